"""The memory of devices, and that of a model's parts, in bytes."""

import enum
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn import Module

from accelerate_nb.big_models.tensors import DISK, accelerator, as_dtype, named_module_tensors
from accelerate_nb.devices.xla import is_awake
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.checkpoints.writer import parse_size
from accelerate_nb.runtime.xla.device import memory as device_memory

# What `accelerate.utils.modeling` offers.
__all__ = [
    "calculate_maximum_sizes", "compute_module_sizes", "compute_module_total_buffer_size", "dtype_byte_size",
    "get_balanced_memory", "get_max_layer_size", "get_max_memory", "get_module_leaves",
]  # fmt: skip

# A part of a model: a module, or a parameter or buffer that stands beside modules.
Part = tuple[str, Module | Tensor]

# Types that torch doesn't have, as `CustomDtype` names them; in bytes.
_CUSTOM = {"fp8": 1.0, "int4": 0.5, "int2": 0.25}

Memory = Mapping[int | str, float | str]
logger = logging.getLogger("accelerate_nb.utils.modeling")


def dtype_byte_size(dtype: Any) -> int | float:
    """
    The bytes of one number of this type; a fraction for types that pack several in a byte.

    >>> dtype_byte_size(torch.float32)
    4
    """
    if isinstance(dtype, str) and not isinstance(dtype, enum.Enum):
        dtype = as_dtype(dtype)
    if dtype == torch.bool:
        return 1 / 8  # Accelerate's figure, which its device maps are made with
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    if isinstance(dtype, enum.Enum) and dtype.value in _CUSTOM:
        size = _CUSTOM[dtype.value]
        return int(size) if size == int(size) else size
    raise ConfigurationError(f"`dtype` is not a valid dtype: {dtype}. Use one of torch's, or a CustomDtype.")


def compute_module_sizes(
    model: Module, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None, buffers_only: bool = False
) -> dict[str, int]:
    """
    The bytes of every module, parameter and buffer by name, as if floating-point weights were converted to `dtype`.

    The whole model is under the empty name; a weight with two names counts once, under the first.
    """
    wanted = None if dtype is None else dtype_byte_size(dtype)
    special = {name: dtype_byte_size(special_dtype) for name, special_dtype in (special_dtypes or {}).items()}
    sizes: dict[str, Any] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        per_number = dtype_byte_size(tensor.dtype)
        if wanted is not None and (tensor.is_floating_point() or tensor.is_complex()):
            per_number = min(wanted, per_number)
        size = tensor.numel() * special.get(name, per_number)
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += size
    return sizes


def compute_module_total_buffer_size(
    model: Module, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None
) -> int:
    """The bytes of all buffers of a model."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def parts_of(model: Module) -> list[Part]:
    """The direct parts of a model: its own parameters, its children, its own buffers."""
    return [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]


def children_of(name: str, part: Module | Tensor, no_split: Collection[str]) -> list[Part]:
    """The parts that a part can be split into; none where it has no children, or is of a class that stays whole."""
    if isinstance(part, Tensor) or type(part).__name__ in no_split:
        return []
    children = list(part.named_children())
    inner: list[Part] = [*part.named_parameters(recurse=False), *children] if children else []
    return [(f"{name}.{child}", item) for child, item in inner]


def get_max_layer_size(
    modules: Sequence[Part], module_sizes: Mapping[str, int], no_split_module_classes: Collection[str]
) -> tuple[int, list[str]]:
    """
    The bytes of the largest layer among these parts, and the names of the layers that are so large.

    A layer is a module without children, or one of a class that must not be split.
    """
    largest, names = 0, list[str]()
    waiting = list(reversed(modules))
    while waiting:
        name, part = waiting.pop()
        children = list(part.named_children()) if isinstance(part, Module) else []
        if children and type(part).__name__ not in no_split_module_classes:
            waiting.extend((f"{name}.{child}", item) for child, item in reversed(children))
            continue
        size = module_sizes[name]
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: Module) -> tuple[int, tuple[int, list[str]]]:
    """The bytes of the model, and those of its largest layer with the names of the layers that are so large."""
    sizes = compute_module_sizes(model)
    # transformers' models say which of their classes stay whole
    no_split: Any = getattr(model, "_no_split_modules", None) or []
    return sizes[""], get_max_layer_size(parts_of(model), sizes, no_split)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """The names that are no prefix of another name, the empty one left out."""
    parents = {name.rpartition(".")[0] for name in module_sizes if "." in name}
    return [name for name in module_sizes if name and name not in parents]


def as_classes(no_split_module_classes: str | Collection[str] | None) -> list[str]:
    """The names of classes as a list, however they were given."""
    if no_split_module_classes is None:
        return []
    return [no_split_module_classes] if isinstance(no_split_module_classes, str) else list(no_split_module_classes)


def get_max_memory(max_memory: Memory | None = None) -> dict[int | str, int]:
    """
    The bytes that each device may hold: those that are free now, or those of `max_memory`, as whole numbers.

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
    count = 1 if is_awake() else torch.accelerator.device_count() if accelerator() else 0
    for number in numbers:
        if not 0 <= number < count:
            logger.warning("Device %d is not available, available devices are %s", number, list(range(count)))
    return {device: parse_size(max_memory[device]) for device in known}


def _free_memory() -> dict[int | str, int]:
    host = psutil.virtual_memory().available
    if is_awake():
        memory_stats = device_memory()  # empty where the device's memory is the host's own
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
    numbers = sorted(device for device, size in memory.items() if isinstance(device, int) and size > 0)
    if count == 1:
        low_zero = False
        # a tenth of the only accelerator is for what is computed there
        for number in numbers if max_memory is None else ():
            memory[number] = int(memory[number] * 0.9)
            logger.info(
                "90%% of device %d is for the model, the rest for its activations; set max_memory for more.", number
            )
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    item = sizes[""] // (count - 1 if low_zero else count) + _slack(model, sizes, as_classes(no_split_module_classes))
    for number in numbers[:-1]:
        memory[number] = min(memory[number] if low_zero and number == 0 else item, memory[number])
    if low_zero and 0 in memory:
        elsewhere = sum(memory[number] for number in numbers if number != 0)
        memory[0] = min(max(0, sizes[""] - elsewhere), memory[0])
    return memory


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
