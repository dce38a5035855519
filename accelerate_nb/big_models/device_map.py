"""Device maps: the device of each part of a model, checked, inferred, and with tied weights kept together."""

import difflib
import logging
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from accelerate_nb.big_models import memory
from accelerate_nb.big_models.tensors import DISK, Device, DeviceMap, as_device, owner_of, tensor_of
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.checkpoints.writer import parse_size
from accelerate_nb.user_warnings import warn_user

# What `accelerate.utils.modeling` offers.
__all__ = [
    "check_device_map", "check_tied_parameters_in_config", "check_tied_parameters_on_same_device", "clean_device_map",
    "fallback_allocate", "find_tied_parameters", "get_module_size_with_ties", "infer_auto_device_map",
    "retie_parameters",
]  # fmt: skip

logger = logging.getLogger("accelerate_nb.utils.modeling")


def check_device_map(model: Module, device_map: DeviceMap) -> None:
    """
    Check that a device map has a device for every tensor in the model's state dict.

    Raises a `ConfigurationError`, which is a `ValueError`, that names the modules which have none; warns of names that are
    no part of the model.
    """
    names = list(model.state_dict())
    tensors = [*names, *(name for name, _ in model.named_buffers())]
    known = {*tensors, *(name for name, _ in model.named_modules())}
    strange = [name for name in device_map if name and name not in known]
    if strange:
        near = [match for name in strange for match in difflib.get_close_matches(name, known, n=1)]
        suggestion = f" Did you mean {near}?" if near else ""
        warn_user(
            f"The following device_map keys do not match any submodules in the model: {strange}.{suggestion}",
            UserWarning,
        )
    left = [name for name in names if covering(name, device_map) is None]
    if left:
        modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in left))
        raise ConfigurationError(
            f"The device_map provided does not give any device for the following parameters: {', '.join(left)}. "
            f"Add their modules to it: {', '.join(repr(module) for module in modules)}; or add a device for all that is not "
            "named, under the empty name ''."
        )


def check_devices(device_map: DeviceMap) -> None:
    """Check that each device in the map is one; the error names the module that stands beside it."""
    for name, device in device_map.items():
        if device == DISK:
            continue
        try:
            as_device(device)
        except ConfigurationError as error:
            raise ConfigurationError(f"The device_map has no available device for {name!r}: {error}") from None


def device_of(name: str, device_map: DeviceMap) -> Device:
    """The device that a map has for a parameter or module: its own, or that of the nearest module around it."""
    found = covering(name, device_map)
    if found is None:
        raise ConfigurationError(
            f"The `device_map` does not contain the module {name}: {name} doesn't have any device set. "
            "Add it, one of the modules around it, or the empty name '' for all that is not named."
        )
    return device_map[found]


def covering(name: str, names: Iterable[str]) -> str | None:
    """The nearest of these names around a parameter or module; `None` where none is."""
    known = names if isinstance(names, (dict, set)) else set(names)
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name if name in known else None


def clean_device_map(device_map: dict[str, Device], module_name: str = "") -> dict[str, Device]:
    """The same map with one entry for each module whose parts are all on one device; the given map is changed."""
    prefix = f"{module_name}." if module_name else ""
    parts = [name for name in device_map if name.startswith(prefix)]
    devices = [device_map[name] for name in parts]
    if len(parts) > 1 and len(set(devices)) == 1:
        for name in parts:
            del device_map[name]
        device_map[module_name] = devices[0]
        return device_map
    depth = prefix.count(".") + 1
    for child in dict.fromkeys(".".join(name.split(".")[:depth]) for name in parts if name != module_name):
        clean_device_map(device_map, child)
    return device_map


# ------------------------------------------------------------------------------------------------------- tied weights


def find_tied_parameters(model: Module, **kwargs: Any) -> list[list[str]]:  # noqa: ARG001 - Accelerate's own recursion used it
    """
    The names of parameters that are one and the same, a sorted list for each such parameter.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> model[1].weight = model[0].weight
    >>> find_tied_parameters(model)
    [['0.weight', '1.weight']]
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def retie_parameters(model: Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make the parameters of each group one again: the first of them that is not on the `meta` device."""
    for group in tied_params:
        whole = next((name for name in group if not tensor_of(model, name).is_meta), None)
        if whole is None:
            continue
        parameter = tensor_of(model, whole)
        for name in group:
            owner, leaf = owner_of(model, name)
            setattr(owner, leaf, parameter)


def check_tied_parameters_in_config(model: Module) -> bool:
    """Whether the configuration of a model of transformers ties some of its weights."""
    if not any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        return False
    config: Any = getattr(model, "config", None)
    decoder = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    if getattr(decoder, "tie_word_embeddings", False) and model.get_output_embeddings():  # type: ignore[operator]
        return True
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False):
        return True
    return any(hasattr(module, "_tie_weights") for module in model.modules())


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: DeviceMap) -> None:
    """Warn of each group of tied parameters that a device map puts on several devices."""
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            logger.warning(
                "Tied parameters are on different devices: %s. They will be one weight no longer, or be copied. "
                "Put them on one device, or let device_map='auto' choose.",
                devices,
            )


def warn_if_untied(model: Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Warn where a model's configuration ties weights that are not tied in the model."""
    if not tied_params and check_tied_parameters_in_config(model):
        logger.warning(
            "The model weights are not tied, though the model's configuration ties them. "
            "Call `model.tie_weights()` before the model is placed."
        )


# ------------------------------------------------------------------------------------------------------ inferred maps


def infer_auto_device_map(
    model: Module,
    max_memory: memory.Memory | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Device]:
    """
    A device for every part of a model: accelerators are filled first, then the CPU, then the disk.

    The first accelerator and the CPU keep memory for the largest layer, which is brought there from where it was offloaded.
    Only sizes are read, so the model may be on the `meta` device. `dtype` and `special_dtypes` (by name) are the types
    that the weights will be loaded in; modules of `no_split_module_classes` stay whole; tied weights go together.

    >>> infer_auto_device_map(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), {0: 200, "cpu": 1000})
    {'0': 0, '1': 'cpu'}
    """
    sizes = memory.compute_module_sizes(model, dtype, special_dtypes)
    tied = find_tied_parameters(model)
    warn_if_untied(model, tied)
    device_filler = _DeviceFiller(
        model, memory.get_max_memory(max_memory), sizes, tied, memory.as_classes(no_split_module_classes)
    )
    device_filler.verbose, device_filler.falls_back = verbose, fallback_allocation
    if not offload_buffers:
        device_filler.buffers_of = lambda module: memory.compute_module_total_buffer_size(module, dtype, special_dtypes)
    device_map = device_filler.run()
    # the buffers of a module that was split go where its first part went
    for name in model.state_dict():
        if covering(name, device_map) is None:
            around = name.rpartition(".")[0]
            near = next((device for item, device in device_map.items() if item.startswith(f"{around}.")), None)
            if near is not None:
                device_map[name] = near
    if clean_result:
        clean_device_map(device_map)
    device_filler.report()
    return device_map


class TiedGroup(NamedTuple):
    """The parts that must go where one part goes, since they share weights with it; `size` is that of all of them together."""

    size: int
    names: list[str]
    modules: list[Module | Tensor]


class _DeviceFiller:
    """One walk through a model's parts that fills one device after the other."""

    verbose = False
    falls_back = False

    def __init__(
        self,
        model: Module,
        budgets: dict[int | str, int],
        sizes: Mapping[str, int],
        tied: list[list[str]],
        no_split: list[str],
    ) -> None:
        self.memory = budgets
        self.devices: list[int | str] = [*budgets, *([] if DISK in budgets else [DISK])]
        self.accelerators = [device for device in self.devices if device not in ("cpu", DISK)]
        # what is offloaded comes back to these to be computed with
        self.reserve_on = ["mps"] if "mps" in self.accelerators else [*self.accelerators[:1], "cpu"]
        self.sizes, self.tied, self.no_split = sizes, tied, no_split
        self.current = 0
        self.used: dict[int | str, int] = dict.fromkeys(self.devices, 0)
        self.buffers: dict[int | str, int] = defaultdict(int)
        self.buffers_of: Any = None
        self.would_need: dict[int | str, int] = {}
        self.waiting = memory.parts_of(model)
        self.largest, self.largest_names = memory.get_max_layer_size(self.waiting, sizes, no_split)
        self.device_map: dict[str, Device] = {}

    def run(self) -> dict[str, Device]:
        """The device of each part."""
        while self.waiting:
            name, part = self.waiting.pop(0)
            self._print(f"\nTreating module {name}.")
            self.largest_names = [layer for layer in self.largest_names if not f"{layer}.".startswith(f"{name}.")]
            if not self.largest_names:
                self._find_largest()
            self._treat(name, part)
        return self.device_map

    @property
    def device(self) -> int | str:
        """The device that is being filled."""
        return self.devices[self.current]

    def _treat(self, name: str, part: Module | Tensor) -> None:
        size = self.sizes[name]
        elsewhere = _tied_elsewhere(name, self.tied)
        ties = get_module_size_with_ties(elsewhere, size, self.sizes, self.waiting)
        if self.device == DISK:
            self._put(name, part, ties, None)
            return
        reserved = self.largest if self.device in self.reserve_on else 0
        memory_budget = self.memory[self.device] - reserved - self.used[self.device]
        if ties.size <= memory_budget:
            self._put(name, part, ties, memory_budget)
        elif elsewhere and size <= memory_budget and self._split_tied(name, part, ties):
            self._print(
                f"Splitting what {name} is tied to: together they take {ties.size}, and {memory_budget} is free."
            )
        elif size >= memory_budget and self._split(name, part):
            self._print(f"Splitting {name}: it takes {size}, and {memory_budget} is free on {self.device}.")
        elif not self._fall_back(name, part, ties):
            self._print(
                f"{name} takes {ties.size} and can't be split; {memory_budget} is free on {self.device}. To the next device."
            )
            if not self.used[self.device]:
                self.would_need[self.device] = ties.size + reserved
            self.used[self.device] += reserved
            self.current += 1
            self.waiting.insert(0, (name, part))

    def _put(self, name: str, part: Module | Tensor, ties: TiedGroup, memory_budget: int | None) -> None:
        free = "" if memory_budget is None else f" (available={memory_budget})"
        also = f" and {ties.names}" if ties.names else f" (size={self.sizes[name]})"
        self._print(f"Putting {name}{also}{free} on {self.device}.")
        self.used[self.device] += ties.size
        for item in (name, *ties.names):
            self.device_map[item] = self.device
        self.waiting = [(other, entry) for other, entry in self.waiting if other not in ties.names]
        if self.buffers_of is not None and isinstance(part, Module):
            self.buffers[self.device] += self.buffers_of(part)

    def _split_tied(self, name: str, part: Module | Tensor, ties: TiedGroup) -> bool:
        """Whether one of the parts that share weights with this one could be split, so that less must come along."""
        for other, module in zip(ties.names, ties.modules, strict=True):
            children = memory.children_of(other, module, self.no_split)
            if children:
                at = next(index for index, (item, _) in enumerate(self.waiting) if item == other)
                self.waiting[at : at + 1] = children
                self.waiting.insert(0, (name, part))
                self._find_largest()
                return True
        return False

    def _split(self, name: str, part: Module | Tensor) -> bool:
        """Whether the part could be replaced by its own parts."""
        children = memory.children_of(name, part, self.no_split)
        if not children:
            return False
        self.waiting[:0] = children
        self._find_largest()
        return True

    def _fall_back(self, name: str, part: Module | Tensor, ties: TiedGroup) -> bool:
        """Whether a smaller part, from further down, fits on a device that would stay empty."""
        if not self.falls_back or self.used[self.device]:
            return False
        limit = self.memory[self.device] - max(self.largest, ties.size)
        found, smaller, rest = fallback_allocate(self.waiting, self.sizes, limit, self.no_split, self.tied)
        if found is None or smaller is None:
            return False
        self.waiting = [(found, smaller), (name, part), *rest]
        return True

    def _find_largest(self) -> None:
        modules = [(name, part) for name, part in self.waiting if isinstance(part, Module)]
        self.largest, self.largest_names = memory.get_max_layer_size(modules, self.sizes, self.no_split)

    def _print(self, line: str) -> None:
        if self.verbose:
            sys.stdout.write(f"{line}\n")

    def report(self) -> None:
        """Report the devices that need more memory."""
        offloaded = self.buffers.get("cpu", 0) + self.buffers.get(DISK, 0)
        fits = any(self.memory[device] >= offloaded + self.used[device] for device in self.accelerators)
        if offloaded and self.accelerators and not fits:
            warn_user(
                f"The buffers of offloaded layers take {offloaded} bytes on the accelerator, and none has so much left. "
                "If memory runs out, pass offload_buffers=True."
            )
        if self.would_need:
            lines = "\n".join(f"  - {device}: {size} bytes required" for device, size in self.would_need.items())
            logger.info(
                "Nothing could be put on these devices due to insufficient memory:\n%s\n"
                "The figures are those of this device map. Give them more memory, or change the model's configuration.",
                lines,
            )


def _tied_elsewhere(name: str, tied: Sequence[Sequence[str]]) -> list[str]:
    """The parameters outside of a part that are tied to one inside of it."""
    found: list[str] = []
    for group in tied:
        outside = [item for item in group if not f"{item}.".startswith(f"{name}.")]
        if len(outside) < len(group):
            found += outside
    return found


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[memory.Part],
) -> TiedGroup:
    """The bytes of a module with the modules that hold `tied_params`, their names, and those modules."""
    names: list[str] = []
    modules: list[Module | Tensor] = []
    for parameter in tied_params:
        # what was placed already is not waiting, and takes nothing more
        for name, module in modules_to_treat:
            if f"{parameter}.".startswith(f"{name}."):
                names.append(name)
                modules.append(module)
                module_size += module_sizes[name] - module_sizes[parameter]
                break
    return TiedGroup(module_size, names, modules)


def fallback_allocate(
    modules: list[memory.Part],
    module_sizes: Mapping[str, int],
    size_limit: float | str,
    no_split_module_classes: Collection[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Module | Tensor | None, list[memory.Part]]:
    """
    The first part that fits into `size_limit`, searched from the outside in: its name, itself, and what is left without it.

    Two times `None` and the parts as they were, where nothing fits.
    """
    try:
        limit = parse_size(size_limit)
    except ConfigurationError:
        return None, None, modules
    no_split, tied = no_split_module_classes or (), tied_parameters or ()
    waiting = list(modules)
    while waiting:
        name, part = waiting.pop(0)
        elsewhere = _tied_elsewhere(name, tied)
        if get_module_size_with_ties(elsewhere, module_sizes[name], module_sizes, waiting).size <= limit:
            return name, part, _without(name, modules)
        waiting[:0] = memory.children_of(name, part, no_split)
    return None, None, modules


def _without(name: str, parts: Sequence[memory.Part]) -> list[memory.Part]:
    """The parts with the one of this name taken out; what was around it is split into its own parts."""
    left: list[memory.Part] = []
    for other, part in parts:
        if other == name:
            continue
        if name.startswith(f"{other}.") and isinstance(part, Module):
            inner: list[memory.Part] = [*part.named_parameters(recurse=False), *part.named_children()]
            left += _without(name, [(f"{other}.{child}", item) for child, item in inner])
        else:
            left.append((other, part))
    return left


def generate_device_map(
    model: Module,
    num_processes: int = 1,
    no_split_module_classes: str | Collection[str] | None = None,
    max_memory: memory.Memory | None = None,
) -> dict[str, Device]:
    """
    The process, by its number, of every part of a model, each with about as many bytes, or with at most `max_memory`.

    A process gets a tenth more than its part, and the largest layer beside it, as Accelerate has it.
    """
    if num_processes > 1 and max_memory is None:
        size, (largest, _) = memory.calculate_maximum_sizes(model)
        each = int(1.1 * (size + largest) / num_processes) + 1
        max_memory = dict.fromkeys(range(num_processes), each)
    return infer_auto_device_map(
        model, max_memory=max_memory, no_split_module_classes=no_split_module_classes, clean_result=False
    )
