"""How the next batch travels to the device while the present one is computed on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from accelerate_nb.runtime.data.batches import leaves_of, placed

_PLAIN = (str, bytes, int, float, bool, list, tuple, type(None))


class Copier(Protocol):
    """What copies a batch in two steps, between which others can run."""

    def begin(self, batch: Any) -> Any:
        """Set off a copy; what is returned is given to `finish`."""
        ...

    def finish(self, begun: Any) -> Any:
        """The copied batch, safe to be used by whatever comes next."""
        ...


def one_copy_ahead(batches: Iterable[tuple[Any, bool]], copier: Copier) -> Iterator[tuple[Any, bool]]:
    """The copied batches, each handed out once the copy of the next one has been set off."""
    waiting: list[tuple[Any, bool]] = []
    for batch, is_last in batches:
        waiting.append((copier.begin(batch), is_last))
        if len(waiting) > 1:
            begun, was_last = waiting.pop(0)
            yield copier.finish(begun), was_last
    for begun, is_last in waiting:
        yield copier.finish(begun), is_last


def overlapping(device: Any, non_blocking: bool) -> Copier | None:
    """What copies beside the computation; `None` where nothing can, or nobody asked for it."""
    return SideStream(torch.device(device)) if non_blocking and torch.device(device).type == "cuda" else None


class SideStream:
    """
    Copies on a CUDA stream of their own, from the host's memory.

    The memory is pinned where the loader has `pin_memory=True`; from other memory the copy is right, and does not overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def begin(self, batch: Any) -> tuple[Any, torch.cuda.Event | None]:
        """Set off the copy, unless the batch holds what may only be moved by the computation's own stream."""
        if not movable_ahead(batch):
            return batch, None
        with torch.cuda.stream(self.stream):
            moved = placed(batch, self.device, non_blocking=True)
        return moved, self.stream.record_event()

    def finish(self, begun: tuple[Any, torch.cuda.Event | None]) -> Any:
        """Make the present stream wait for the copy, which belongs to it from here on."""
        batch, copied = begun
        if copied is None:
            return placed(batch, self.device, non_blocking=True)
        present = torch.cuda.current_stream(self.device)
        present.wait_event(copied)
        for leaf in leaves_of(batch):
            if isinstance(leaf, Tensor):
                # the caching allocator would give the memory to the side stream's next copy while this stream still reads it:
                # https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html
                leaf.record_stream(present)
        return batch


def movable_ahead(batch: Any) -> bool:
    """Whether everything in the batch is known: plain tensors in the host's memory, and what isn't moved at all."""
    return all(_is_plain(leaf) for leaf in leaves_of(batch))


def _is_plain(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.device.type == "cpu" and leaf.layout == torch.strided and not leaf.is_nested
    return isinstance(leaf, _PLAIN)
