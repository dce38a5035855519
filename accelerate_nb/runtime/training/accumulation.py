"""The synchronisation of gradients: windows of micro-steps, and the active loader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch.nn import Module, ModuleDict, ModuleList
from torch.utils.weak import WeakIdRef

from accelerate_nb.runtime.world.registry import SharedState

if TYPE_CHECKING:
    from accelerate_nb.runtime.compat.dataclasses import GradientAccumulationPlugin


@dataclass(slots=True)
class AccumulationWindow:
    """The progress of one group of models in gathering the gradients of a step."""

    count: int = 0
    position: int = 0
    length: int | None = None

    def advance(self, num_steps: int, *, at_end: bool) -> bool:
        """A micro-step begins, the `position`-th of its window; returns whether it is the last."""
        self.position = self.count % num_steps + 1
        self.count = 0 if at_end else self.count + 1
        return at_end or self.position == num_steps

    def correct(self, num_steps: int, batches_left: int | None, *, is_last: bool) -> float:
        """Find the window's `length`; returns the factor of its gradients so far, 1 unless it ends at another length than expected."""
        if self.position == 1 or self.length is None:
            self.length = num_steps if batches_left is None else min(num_steps, self.position + batches_left)
        expected = self.length
        if is_last:
            self.length = self.position
        return expected / self.length


class AccumulationWindows:
    """The windows of a process, one for each group of models that is given to `accumulate`: groups are counted apart, as in a GAN."""

    __slots__ = ("_begun_at", "_current", "_group", "_others")

    def __init__(self, count: int = 0) -> None:
        self._begun_at = count
        self._current = AccumulationWindow(count)
        self._group: tuple[WeakIdRef, ...] | None = None
        self._others: dict[tuple[WeakIdRef, ...], AccumulationWindow] = {}

    @property
    def count(self) -> int:
        """The number of micro-steps that the last active group has made."""
        return self._current.count

    def of(self, models: Iterable[Any]) -> AccumulationWindow:
        """The window of a group of single models; without a module among them it is the last active group's."""
        group = tuple(WeakIdRef(model) for model in models if isinstance(model, Module))
        if group and group != self._group:
            if self._group is not None:
                self._others[self._group] = self._current
                self._others = {
                    known: window
                    for known, window in self._others.items()
                    if all(model() is not None for model in known)
                }
                # a checkpoint has one count, which is that of all groups
                self._current = self._others.pop(group) if group in self._others else AccumulationWindow(self._begun_at)
            self._group = group
        return self._current


def single_models(models: Iterable[Any]) -> list[Any]:
    """The models themselves, also those in lists or torch's containers, which a script may make anew for each block."""
    found: list[Any] = []
    for model in models:
        if type(model) in (ModuleList, ModuleDict):  # not a subclass of theirs, as FSDP 2 makes of a prepared one
            found += single_models(model.children())
        else:
            found += single_models(model) if isinstance(model, (list, tuple)) else [model]
    return found


class GradientState:
    """The accumulation of this process, seen from anywhere in it: every instance shows the same attributes."""

    # A loader or an optimizer that was prepared in a world that has ended goes on in the next one.
    _shared_state = SharedState(lasting=True)

    sync_gradients: bool = True
    active_dataloader: Any = None  # the innermost one that is being read
    is_xla_gradients_synced: bool = False
    # how often a gradient was computed or an optimizer stepped: a loader that sees none of it is read to evaluate
    training_calls: int = 0
    plugin_kwargs: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = self._shared_state
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    @property
    def initialized(self) -> bool:
        """Whether an `Accelerator` has set the accumulation."""
        return "plugin_kwargs" in self.__dict__

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being read, the innermost last, after a `None` for when there is none."""
        references: list[Any] = self.__dict__.setdefault("_references", [None])
        return references

    @property
    def num_steps(self) -> int:
        """The number of micro-steps in a step."""
        steps: int = self.plugin_kwargs.get("num_steps", 1)
        return steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether a scheduler counts the micro-steps too; as in Accelerate, only where it was set to other than its default."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", False))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the end of a loader ends the window of accumulation."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are exchanged at every micro-step, which takes less memory and more time."""
        return bool(self.plugin_kwargs.get("sync_each_batch", False))

    @property
    def average_over_window(self) -> bool:
        """Whether a window that a loader's end cuts short is divided by the micro-steps that it has."""
        return bool(self.plugin_kwargs.get("average_over_window", False))

    @property
    def batches_left(self) -> int | None:
        """The number of batches before the end of the loader ends a window; `None` where that is not known."""
        return getattr(self.active_dataloader, "batches_left", None) if self.sync_with_dataloader else None

    @property
    def batch(self) -> tuple[int, ...] | None:
        """The key of the current batch, for a loader that has its device begin before the next one; `None` for others."""
        loader = self.active_dataloader
        if loader is None or getattr(loader, "between", None) is None:
            return None
        return id(loader), loader.iteration, loader.batches_read

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of the active loader."""
        return self.active_dataloader is not None and bool(self.active_dataloader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """The number of new samples in the last batch, where some were repeated to even it out; -1 outside of a loader."""
        return -1 if self.active_dataloader is None else int(self.active_dataloader.remainder)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: Any) -> None:
        self.dataloader_references.append(dataloader)
        self.active_dataloader = dataloader

    def _remove_dataloader(self, dataloader: Any) -> None:
        references = self.dataloader_references
        for index in range(len(references) - 1, 0, -1):
            if references[index] is dataloader:  # by identity: a loader may define equality as it likes
                del references[index]
                break
        self.active_dataloader = references[-1]

    @staticmethod
    def _reset_state() -> None:
        GradientState._shared_state.clear()

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )
