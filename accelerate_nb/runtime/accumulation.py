"""When gradients are synchronised, and which loader is being read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accelerate_nb.runtime.current import Shared

if TYPE_CHECKING:
    from accelerate_nb.runtime.handlers import GradientAccumulationPlugin


class GradientState:
    """
    The accumulation of this process, seen from anywhere in it: every instance shows the same attributes.

    Loaders enter themselves with `_add_dataloader` when an iteration begins and leave with `_remove_dataloader` when it
    ends in whatever way; the innermost one is `active_dataloader`.
    """

    # A loader or an optimizer that was prepared in a world that has ended goes on in the next one.
    _shared_state = Shared(lasting=True)

    sync_gradients: bool = True
    active_dataloader: Any = None
    is_xla_gradients_synced: bool = False
    plugin_kwargs: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = self._shared_state
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    @property
    def initialized(self) -> bool:
        """Whether an `Accelerator` has said how to accumulate."""
        return "plugin_kwargs" in self.__dict__

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being read, the innermost last, after a `None` for when there is none."""
        references: list[Any] = self.__dict__.setdefault("_references", [None])
        return references

    @property
    def num_steps(self) -> int:
        """How many micro-steps make a step."""
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
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch at hand is the last of the loader that is being read."""
        return self.active_dataloader is not None and bool(self.active_dataloader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """How many samples of the last batch are new, where some were repeated to even it out; -1 outside of a loader."""
        return -1 if self.active_dataloader is None else int(self.active_dataloader.remainder)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: Any) -> None:
        self.dataloader_references.append(dataloader)
        self.active_dataloader = dataloader

    def _remove_dataloader(self, dataloader: Any) -> None:
        references = self.dataloader_references
        for place in range(len(references) - 1, 0, -1):
            if references[place] is dataloader:  # by identity: a loader may define equality as it likes
                del references[place]
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
