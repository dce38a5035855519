"""The memory that each device may give to a model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import psutil
import torch
from torch.nn import Module

from accelerate_nb.big_models.device_map.module_sizes import as_classes, compute_module_sizes, get_module_leaves
from accelerate_nb.big_models.devices import DISK, accelerator
from accelerate_nb.devices.xla import is_awake
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.checkpoints.weights import parse_size
from accelerate_nb.runtime.xla import device as xla

logger = logging.getLogger("accelerate_nb.utils.modeling")

Memory = Mapping[int | str, int | str]


def get_max_memory(max_memory: Memory | None = None) -> dict[int | str, int]:
    """
    The bytes that each device may hold: those that are free now, or those of `max_memory` with its texts made numbers.

    Accelerators come first, by their numbers, then `mps`, `cpu` and `disk`.

    >>> get_max_memory({"cpu": "1GB", 0: "500MB"})
    {0: 500000000, 'cpu': 1000000000}
    """
    if max_memory is None:
        return _free_memory()
    numbers = sorted(device for device in max_memory if isinstance(device, int))
    known: list[int | str] = [*numbers, *(name for name in ("mps", "cpu", DISK) if name in max_memory)]
    for device in max_memory:
        if device not in known:
            raise ConfigurationError(
                f"Device {device!r} is not recognized in max_memory. Accelerators are numbers; besides them there are 'mps', "
                "'cpu' and 'disk'."
            )
    _warn_of_absent(numbers)
    return {device: parse_size(max_memory[device]) for device in known}


def _free_memory() -> dict[int | str, int]:
    host = psutil.virtual_memory().available
    if is_awake():
        memory_stats = xla.memory()  # empty where the device's memory is the host's own
        return {**({0: memory_stats["bytes_limit"] - memory_stats["bytes_used"]} if memory_stats else {}), "cpu": host}
    device_type = accelerator()
    if device_type == "mps":
        return {"mps": host}  # its memory is the host's own
    memory: dict[int | str, int] = {}
    if device_type is not None:
        module = torch.get_device_module(device_type)
        for index in range(torch.accelerator.device_count()):
            try:
                memory[index] = module.mem_get_info(index)[0]
            except RuntimeError as error:  # a device that another process holds alone
                logger.info("Device %d gives no memory, so nothing is put there: %s", index, error)
    if device_type == "cuda" and any(torch.cuda.get_device_properties(index).is_integrated for index in memory):
        return memory  # the same memory is not counted twice
    memory["cpu"] = host
    return memory


def _warn_of_absent(numbers: list[int]) -> None:
    count = 1 if is_awake() else torch.accelerator.device_count() if accelerator() else 0
    for number in numbers:
        if not 0 <= number < count:
            logger.warning("Device %d is not available, available devices are %s", number, list(range(count)))


def get_balanced_memory(
    model: Module,
    max_memory: Memory | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """
    The bytes for each device with which `infer_auto_device_map` spreads a model evenly over the accelerators.

    With `low_zero` the first of them gets as little as can be, for those who compute other things there. The last keeps all
    of its memory, in case the others turn out to be too small.
    """
    memory = get_max_memory(max_memory)
    device_type = accelerator() or "cuda"
    count = sum(1 for device, size in memory.items() if (isinstance(device, int) or device == device_type) and size > 0)
    if count == 0:
        return memory
    if count == 1:
        low_zero = False
        if max_memory is None:
            _reserve_for_activations(memory)
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    item = sizes[""] // (count - 1 if low_zero else count) + _slack(model, sizes, as_classes(no_split_module_classes))
    numbers = sorted(device for device, size in memory.items() if isinstance(device, int) and size > 0)
    for number in numbers[:-1]:
        memory[number] = min(memory[number] if low_zero and number == 0 else item, memory[number])
    if low_zero and 0 in memory:
        elsewhere = sum(memory[number] for number in numbers if number != 0)
        memory[0] = min(max(0, sizes[""] - elsewhere), memory[0])
    return memory


def _reserve_for_activations(memory: dict[int | str, int]) -> None:
    """A tenth of the only accelerator is for what is computed there."""
    for device, size in memory.items():
        if isinstance(device, int):
            memory[device] = int(size * 0.9)
            logger.info(
                "90%% of device %d is for the model, the rest for its activations; set max_memory for more.", device
            )
            return


def _slack(model: Module, sizes: Mapping[str, int], no_split: list[str]) -> int:
    """The memory of a device above its share, so that layers which can't be cut fit: the larger of a block and a mean layer."""
    blocks: dict[str, int] = {}
    for name, module in model.named_modules():
        class_name = type(module).__name__
        if name in sizes and class_name in no_split:
            blocks.setdefault(class_name, sizes[name])
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    layers = get_module_leaves(modules)
    mean = int(sum(modules[name] for name in layers) / max(len(layers), 1))
    return int(1.25 * max(mean, *blocks.values(), 0))
