"""The suspension of what a process has joined and prepared while a function begins as in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from accelerate_nb.runtime.world import registry
from accelerate_nb.runtime.world.rebuild_groups import EndedGroups, end, part
from accelerate_nb.user_warnings import warn_user

# What Hugging Face's own library keeps for all of a process, by the names of its classes in `accelerate.state`.
_THEIRS = ("PartialState", "AcceleratorState", "GradientState")


@dataclass(frozen=True, slots=True)
class SuspendedState:
    """The state of a process that waits until a function is done in it."""

    world: Callable[[], None]
    hf_states: Mapping[str, Mapping[str, Any]]
    groups: EndedGroups | None
    hook: Callable[..., Any]

    @property
    def meets(self) -> bool:
        """Whether the process needs a rendezvous with the others to be restored."""
        return self.groups is not None

    def leave(self) -> None:
        """End what the function has joined, and be what the process was before, but for its process groups."""
        end()
        registry.forget()
        self.world()
        for name, shared in _shared():
            shared.clear()
            shared.update(self.hf_states.get(name, {}))
        self._hook_back()

    def join_groups(self, store: dist.Store) -> None:
        """Rebuild the process groups that were there, over a store that no rendezvous has used; all processes call it."""
        if self.groups is None:
            return
        self.groups.join_groups(store)
        self._hook_back()
        if self.groups.others:
            warn_user(
                f"{self.groups.others} process groups of your own (new_group, device meshes) have ended: while a launched "
                "function runs, its process has groups of its own. Make them again, or make them inside the function."
            )

    def _hook_back(self) -> None:
        """Each process group that is made has torch write the rank, once more, before every line of a last exception."""
        sys.excepthook = self.hook


def suspend() -> SuspendedState:
    """Put aside what this process has joined and prepared; it is then as one that has just begun."""
    groups = part() if dist.is_available() and dist.is_initialized() else None
    hf_states = {name: dict(shared) for name, shared in _shared()}
    for _, shared in _shared():
        shared.clear()
    return SuspendedState(registry.suspend(), hf_states, groups, sys.excepthook)


def _shared() -> Iterator[tuple[str, dict[str, Any]]]:
    """The dictionaries that all instances of a class of Hugging Face's are made of."""
    module = sys.modules.get("accelerate.state")
    for name in _THEIRS if module is not None else ():
        yield name, getattr(module, name)._shared_state
