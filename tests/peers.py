"""The differential harness: one script, run by real ranks under Hugging Face Accelerate, then under this package."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from tests.ranks import LIMIT, run_on_ranks


@dataclass(frozen=True)
class Both:
    """What a script returned on each rank: under Accelerate, and under this package."""

    theirs: list[Any]
    ours: list[Any]


class Peer:
    """One of the two packages, as a script sees it: `peer.Accelerator`, `peer.door("utils").gather`."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def is_ours(self) -> bool:
        """Whether this is the package under test; for what a script may not do under the other."""
        return self.name == "accelerate_nb"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(self.name), name)

    def door(self, path: str) -> ModuleType:
        """A module of the package: `utils`, `data_loader`, `utils.operations`."""
        return import_module(f"{self.name}.{path}")


def say_that_ranks_have_devices(peer: Peer) -> None:
    """Accelerate shards and splits nothing on a CPU otherwise, and says nothing of it; ours does."""
    if not peer.is_ours:
        state = peer.door("state")
        state.PartialState(cpu=True)
        state.PartialState._shared_state["distributed_type"] = peer.door("utils").DistributedType.MULTI_GPU


def under_both(script: Callable[..., Any], world_size: int, *args: Any, limit: float = LIMIT) -> Both:
    """
    What `script(peer, *args)` returns on each of `world_size` ranks, with each package.

    The script stands at the top level of its module; it returns plain values (numbers, lists, tensors), not either package's
    objects. Ranks compute on the CPU; each package gets processes of its own.
    """
    theirs = run_on_ranks(_run, world_size, script, "accelerate", args, limit=limit)
    ours = run_on_ranks(_run, world_size, script, "accelerate_nb", args, limit=limit)
    return Both(theirs, ours)


def _run(script: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Any:
    import os

    # Accelerate connects ranks on a machine without a GPU only where this is said
    os.environ["ACCELERATE_USE_CPU"] = "true"
    return script(Peer(name), *args)
