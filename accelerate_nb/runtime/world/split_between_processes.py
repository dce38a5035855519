"""A collection, cut into one part for each process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.world.world import World


def share_of(inputs: Any, world: World, *, padded: bool = False) -> Any:
    """The process's part of `inputs`, which stay as they are; `padded` repeats the last element for equal lengths."""
    if world.size == 1:
        return inputs
    length = _length(inputs)
    part, extra = divmod(length, world.size)
    start = world.rank * part + min(world.rank, extra)
    end = start + part + (1 if world.rank < extra else 0)
    missing = part + (1 if extra else 0) - (end - start) if padded else 0
    return _cut(inputs, start, end, missing, world.device if padded else None)


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        return len(inputs)
    lengths = {str(name): len(values) for name, values in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigurationError(
            f"A dictionary is split along its values, which must be equally long, but their lengths are {lengths}."
        )
    return next(iter(lengths.values()), 0)


def _cut(values: Any, start: int, end: int, missing: int, device: torch.device | None) -> Any:
    if isinstance(values, Mapping):
        return {name: _cut(value, start, end, missing, device) for name, value in values.items()}
    if isinstance(values, torch.Tensor):
        part = values[start:end]
        part = torch.cat([part, values[-1:].expand(missing, *values.shape[1:])]) if missing else part
        return part if device is None else part.to(device)
    if isinstance(values, list):
        return [*values[start:end], *values[-1:] * missing]
    if isinstance(values, tuple):
        return (*values[start:end], *values[-1:] * missing)
    datasets = sys.modules.get("datasets")  # its data sets exist only where it has been imported
    if datasets is not None and isinstance(values, datasets.Dataset):
        return values.select([*range(start, end), *[len(values) - 1] * missing])
    return values
