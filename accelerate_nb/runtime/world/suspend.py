"""What a process has joined and prepared is put aside while a function begins as in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from accelerate_nb.notices import notice
from accelerate_nb.runtime import current
from accelerate_nb.runtime.renewing import Parted, end, part

# What Hugging Face's own library keeps for all of a process, by the names of its classes in `accelerate.state`.
_THEIRS = ("PartialState", "AcceleratorState", "GradientState")


def lasting_store() -> dist.Store:
    """The store at which this process meets the others, for as long as it runs."""
    return current.lasting_store()


@dataclass(frozen=True, slots=True)
class Aside:
    """The state of a process that waits until a function is done in it."""

    world: Callable[[], None]
    theirs: Mapping[str, Mapping[str, Any]]
    groups: Parted | None
    hook: Callable[..., Any]

    @property
    def meets(self) -> bool:
        """Whether the process has to meet the others to be what it was."""
        return self.groups is not None

    def leave(self) -> None:
        """End what the function has joined, and be what the process was before, but for its process groups."""
        end()
        current.forget()
        self.world()
        for name, shared in _shared():
            shared.clear()
            shared.update(self.theirs.get(name, {}))
        self._hook_back()

    def meet(self, store: dist.Store) -> None:
        """Make the process groups anew that were there, over a store that nothing has met at; all processes call it."""
        if self.groups is None:
            return
        self.groups.meet(store)
        self._hook_back()
        if self.groups.others:
            notice(
                f"{self.groups.others} process groups of your own (new_group, device meshes) have ended: while a launched "
                "function runs, its process has groups of its own. Make them again, or make them inside the function."
            )

    def _hook_back(self) -> None:
        """Each process group that is made has torch write the rank, once more, before every line of a last exception."""
        sys.excepthook = self.hook


def put_aside() -> Aside:
    """Put aside what this process has joined and prepared; it is then as one that has just begun."""
    groups = part() if dist.is_available() and dist.is_initialized() else None
    theirs = {name: dict(shared) for name, shared in _shared()}
    for _, shared in _shared():
        shared.clear()
    return Aside(current.put_aside(), theirs, groups, sys.excepthook)


def _shared() -> Iterator[tuple[str, dict[str, Any]]]:
    """The dictionaries that all instances of a class of Hugging Face's are made of."""
    module = sys.modules.get("accelerate.state")
    for name in _THEIRS if module is not None else ():
        yield name, getattr(module, name)._shared_state
