"""The seeds of random numbers."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from accelerate_nb.devices.xla import random_state, set_random_state
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.dataclasses import RNGType, named
from accelerate_nb.runtime.operations.collective import broadcast_object_list
from accelerate_nb.runtime.world.registry import along, current_world
from accelerate_nb.runtime.world.world import Axis


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """
    Seed Python's, numpy's and torch's generators, those of all devices included.

    With `device_specific` each process adds its rank; with `deterministic` torch uses deterministic algorithms only.

    >>> set_seed(0)
    """
    if device_specific:
        seed += current_world().rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    set_random_state(seed)  # which torch's own function does not reach; one that is asleep begins with this seed
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None, *, axis: Axis = None
) -> None:
    """Give all processes the main process's states of these generators; all of them must call it."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator, axis=axis)


def synchronize_rng_state(
    rng_type: str | RNGType | None = None, generator: torch.Generator | None = None, *, axis: Axis = None
) -> None:
    """
    Give all processes the main process's state of one generator; all of them must call it. With an `axis` of the mesh, or several,
    the processes are those along it, and their first one has the state.

    "torch" is the CPU's, "generator" the one that is passed, any other name that of a device ("cuda", "xpu", ...).
    """
    read, write = _access(named(rng_type), generator)
    if along(axis).size > 1:
        (state,) = broadcast_object_list([read()], axis=axis)
        write(state)


def _access(name: str, generator: torch.Generator | None) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    if name not in RNGType:
        raise ConfigurationError(f"rng_type={name!r} was requested. Known ones are {', '.join(RNGType.list())}.")
    if name == "torch":
        return torch.get_rng_state, torch.set_rng_state
    if name == "xla":
        if current_world().device.type != "xla":
            raise ConfigurationError(
                f"The random state of 'xla' was to be synchronised, but this process computes on {current_world().device}. "
                "Leave it out of rng_types."
            )
        return random_state, set_random_state
    if name != "generator":
        module = getattr(torch, name, None)
        if module is None or not module.is_available():
            raise ConfigurationError(
                f"The random state of {name!r} was to be synchronised, but this process has no such device. "
                f"Leave it out of rng_types."
            )
        return module.get_rng_state, module.set_rng_state
    if generator is None:
        raise ConfigurationError("rng_type='generator' was requested without a generator. Pass one: `generator=...`.")
    return generator.get_state, generator.set_state
