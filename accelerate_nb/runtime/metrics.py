"""What all processes computed for a batch, without the samples that were repeated to even it out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from accelerate_nb.runtime.accumulation import GradientState
from accelerate_nb.runtime.operations import collective


def gather_for_metrics(data: Any, gradients: GradientState, *, as_objects: bool = False) -> Any:
    """
    Every process's `data`, joined; at the end of a loader only as many samples of the last batch as there really are.

    What holds no tensors, and anything with `as_objects`, travels as objects: a list is joined to one list of samples, and
    whatever is no list has no samples to leave out. A tensor without dimensions is one number a process, not a sample.
    """
    if as_objects or not _only_tensors(data):
        gathered = collective.gather_object(data)
        return gathered[: _real(gradients)] if isinstance(data, (list, tuple)) else gathered
    return _without_repeated(data, collective.gather(data), _real(gradients))


def _real(gradients: GradientState) -> int | None:
    """How many samples of the batch at hand are real; `None` for all of them."""
    if not gradients.end_of_dataloader or gradients.remainder <= 0:
        return None
    return gradients.remainder


def _only_tensors(data: Any) -> bool:
    if isinstance(data, Tensor):
        return True
    if isinstance(data, Mapping):
        return bool(data) and all(map(_only_tensors, data.values()))
    return isinstance(data, (list, tuple)) and bool(data) and all(map(_only_tensors, data))


def _without_repeated(data: Any, gathered: Any, real: int | None) -> Any:
    if real is None:
        return gathered
    if isinstance(gathered, Tensor):
        return gathered if data.ndim == 0 else gathered[:real]
    if isinstance(gathered, Mapping):
        kept = {name: _without_repeated(data[name], each, real) for name, each in gathered.items()}
        return type(gathered)(kept)  # type: ignore[call-arg]  # a mapping that can be made of another
    parts = [_without_repeated(mine, each, real) for mine, each in zip(data, gathered, strict=True)]
    return type(gathered)(*parts) if hasattr(gathered, "_fields") else type(gathered)(parts)
