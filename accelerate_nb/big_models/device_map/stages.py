"""A device map that spreads a model evenly over processes."""

from __future__ import annotations

from collections.abc import Collection

from torch.nn import Module

from accelerate_nb.big_models.device_map.infer import infer_auto_device_map
from accelerate_nb.big_models.device_map.max_memory import Memory
from accelerate_nb.big_models.device_map.module_sizes import calculate_maximum_sizes
from accelerate_nb.big_models.devices import Device


def generate_device_map(
    model: Module,
    num_processes: int = 1,
    no_split_module_classes: str | Collection[str] | None = None,
    max_memory: Memory | None = None,
) -> dict[str, Device]:
    """
    The process, by its number, of every part of a model, each with about as many bytes, or with at most `max_memory`.

    A process gets a tenth more than its part, and the largest layer beside it, as Accelerate has it.
    """
    if num_processes > 1 and max_memory is None:
        size, (largest, _) = calculate_maximum_sizes(model)
        each = int(1.1 * (size + largest) / num_processes) + 1
        max_memory = dict.fromkeys(range(num_processes), each)
    return infer_auto_device_map(
        model, max_memory=max_memory, no_split_module_classes=no_split_module_classes, clean_result=False
    )
