"""The seeds of random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from accelerate_nb.devices import xla
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.enums import RNGType, named
from accelerate_nb.runtime.operations.collective import broadcast_object_list
from accelerate_nb.runtime.world.registry import current_world


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
    xla.set_random_state(seed)  # which torch's own function does not reach; one that is asleep begins with this seed
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None) -> None:
    """Give all processes the main process's states of these generators; all of them must call it."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def synchronize_rng_state(rng_type: str | RNGType | None = None, generator: torch.Generator | None = None) -> None:
    """
    Give all processes the main process's state of one generator; all of them must call it.

    "torch" is the CPU's, "generator" the one that is passed, any other name that of a device ("cuda", "xpu", ...).
    """
    source = _source(named(rng_type), generator)
    if current_world().size > 1:
        (state,) = broadcast_object_list([source.get_state()])
        source.set_state(state)


class _XlaGenerator:
    """The generator of this process's XLA device, in the manner of a `torch.Generator`: one number is its state."""

    def __init__(self) -> None:
        if current_world().device.type != "xla":
            raise ConfigurationError(
                f"The random state of 'xla' was to be synchronised, but this process computes on {current_world().device}. "
                "Leave it out of rng_types."
            )

    def get_state(self) -> int | None:
        return xla.random_state()

    def set_state(self, state: int | None) -> None:
        xla.set_random_state(state)


class _DeviceGenerator:
    """The generator of this process's device of a type, in the manner of a `torch.Generator`."""

    def __init__(self, name: str) -> None:
        self.module = getattr(torch, name, None)
        if self.module is None or not self.module.is_available():
            raise ConfigurationError(
                f"The random state of {name!r} was to be synchronised, but this process has no such device. "
                f"Leave it out of rng_types."
            )

    def get_state(self) -> Any:
        return self.module.get_rng_state()  # type: ignore[union-attr]  # not None, as checked

    def set_state(self, state: torch.Tensor) -> None:
        self.module.set_rng_state(state)  # type: ignore[union-attr]  # not None, as checked


def _source(name: str, generator: torch.Generator | None) -> Any:
    if name not in RNGType:
        raise ConfigurationError(f"rng_type={name!r} was requested. Known ones are {', '.join(RNGType.list())}.")
    if name == "xla":
        return _XlaGenerator()
    if name == "torch":
        return torch.default_generator
    if name != "generator":
        return _DeviceGenerator(name)
    if generator is None:
        raise ConfigurationError("rng_type='generator' was requested without a generator. Pass one: `generator=...`.")
    return generator
