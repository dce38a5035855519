"""The parts of a training's memory on a rank, in numbers and in words, and the batch that would fit."""

from __future__ import annotations

import math

from accelerate_nb.events.model import MemoryUse
from accelerate_nb.reports.text_format import bytes_text

# The parts in the order of strips; what a device can't tell is 0.
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "others")
# Of a device, a part that its allocator can't use for whole blocks.
_USABLE = 0.98
# With fewer activations than these of the peak, nothing can be said of larger batches.
_LEAST_ACTIVATIONS = 0.05
_LARGEST_FACTOR = 8.0


def memory_parts(memory: MemoryUse) -> tuple[int, ...]:
    """
    The bytes of each of `MEMORY_PARTS`.

    Activations are what the allocator's peak held beside the first three, with what operations need for a moment; they are measured on
    GPUs alone. Others are what the device, or on a CPU the process, has in use beside all that: caches, libraries, other processes.

    >>> memory_parts(MemoryUse(0, 10, 10, 20, 70, 0.0, used=75, total=100))
    (10, 10, 20, 30, 5)
    """
    held = memory.weights + memory.gradients + memory.optimizer
    activations = 0 if memory.peak is None else max(memory.peak - held, 0)
    others = 0 if memory.used is None else max(memory.used - held - activations, 0)
    return memory.weights, memory.gradients, memory.optimizer, activations, others


def batch_factor(memory: MemoryUse) -> float | None:
    """
    How many times the batch would fit where activations grow with it, in tenths; `None` where that can't be said, or is hardly more.

    >>> batch_factor(MemoryUse(0, 10, 10, 20, 70, 0.0, used=75, total=100))
    1.7
    """
    *_, activations, others = memory_parts(memory)
    if memory.total is None or memory.peak is None or activations < _LEAST_ACTIVATIONS * memory.peak:
        return None
    fixed = memory.peak - activations + others
    factor = math.floor(10 * (_USABLE * memory.total - fixed) / activations) / 10
    return min(factor, _LARGEST_FACTOR) if factor >= 1.1 else None


def memory_text(memory: MemoryUse) -> str:
    """
    A rank's memory in words, with the peak and what would fit.

    >>> memory_text(MemoryUse(0, 1 << 20, 1 << 20, 1 << 21, None, 0.0))
    'holds 1.0 MiB of weights, 1.0 MiB of gradients, 2.0 MiB of optimizer'
    """
    *_, activations, others = memory_parts(memory)
    names = ("weights", "gradients", "optimizer")
    parts = ", ".join(f"{bytes_text(getattr(memory, name))} of {name}" for name in names)
    if memory.peak is None:
        whole = "" if memory.used is None else f"; the process takes {bytes_text(memory.used)} in all"
        return f"holds {parts}{whole}"
    if memory.used is None:
        return f"holds {parts}; peak {bytes_text(memory.peak)}"
    factor = batch_factor(memory)
    fits = "" if factor is None else f": a batch of about {factor:.1f} × would fit"
    more = f"{bytes_text(activations)} of activations, {bytes_text(others)} of others"
    return f"holds {parts}, {more}; peak {bytes_text(memory.peak + others, memory.total)}{fits}"
