"""The device of each part of a model, chosen from sizes alone."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from accelerate_nb.big_models.device_map.check import clean_device_map, covering
from accelerate_nb.big_models.device_map.max_memory import Memory, get_max_memory
from accelerate_nb.big_models.device_map.module_sizes import (
    Part,
    as_classes,
    children_of,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    parts_of,
)
from accelerate_nb.big_models.device_map.tied_weights import find_tied_parameters, warn_if_untied
from accelerate_nb.big_models.devices import DISK, Device
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.checkpoints.weights import parse_size
from accelerate_nb.user_warnings import warn_user

logger = logging.getLogger("accelerate_nb.utils.modeling")


def infer_auto_device_map(
    model: Module,
    max_memory: Memory | None = None,
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
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    tied = find_tied_parameters(model)
    warn_if_untied(model, tied)
    device_filler = _DeviceFiller(model, get_max_memory(max_memory), sizes, tied, as_classes(no_split_module_classes))
    device_filler.verbose, device_filler.falls_back = verbose, fallback_allocation
    if not offload_buffers:
        device_filler.buffers_of = lambda module: compute_module_total_buffer_size(module, dtype, special_dtypes)
    device_map = device_filler.run()
    _add_own_buffers(model, device_map)
    if clean_result:
        clean_device_map(device_map)
    device_filler.report()
    return device_map


@dataclass(frozen=True)
class _TiedGroup:
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
        memory: dict[int | str, int],
        sizes: Mapping[str, int],
        tied: list[list[str]],
        no_split: list[str],
    ) -> None:
        self.memory = memory
        self.devices: list[int | str] = [*memory, *([] if DISK in memory else [DISK])]
        self.accelerators = [device for device in self.devices if device not in ("cpu", DISK)]
        # what is offloaded comes back to these to be computed with
        self.reserve_on = ["mps"] if "mps" in self.accelerators else [*self.accelerators[:1], "cpu"]
        self.sizes, self.tied, self.no_split = sizes, tied, no_split
        self.current = 0
        self.used: dict[int | str, int] = dict.fromkeys(self.devices, 0)
        self.buffers: dict[int | str, int] = defaultdict(int)
        self.buffers_of: Any = None
        self.would_need: dict[int | str, int] = {}
        self.waiting = parts_of(model)
        self.largest, self.largest_names = get_max_layer_size(self.waiting, sizes, no_split)
        self.device_map: dict[str, Device] = {}

    def run(self) -> dict[str, Device]:
        """The device of each part."""
        while self.waiting:
            name, part = self.waiting.pop(0)
            self._print(f"\nTreating module {name}.")
            self._leave_out_of_largest(name)
            self._treat(name, part)
        return self.device_map

    @property
    def device(self) -> int | str:
        """The device that is being filled."""
        return self.devices[self.current]

    @property
    def _reserved(self) -> int:
        return self.largest if self.device in self.reserve_on else 0

    def _treat(self, name: str, part: Module | Tensor) -> None:
        size = self.sizes[name]
        elsewhere = _tied_elsewhere(name, self.tied)
        ties = _ties(elsewhere, size, self.sizes, self.waiting)
        if self.device == DISK:
            self._put(name, part, ties, None)
            return
        memory_budget = self.memory[self.device] - self._reserved - self.used[self.device]
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
            self._next_device(name, part, ties)

    def _put(self, name: str, part: Module | Tensor, ties: _TiedGroup, memory_budget: int | None) -> None:
        free = "" if memory_budget is None else f" (available={memory_budget})"
        also = f" and {ties.names}" if ties.names else f" (size={self.sizes[name]})"
        self._print(f"Putting {name}{also}{free} on {self.device}.")
        self.used[self.device] += ties.size
        for item in (name, *ties.names):
            self.device_map[item] = self.device
        self.waiting = [(other, entry) for other, entry in self.waiting if other not in ties.names]
        if self.buffers_of is not None and isinstance(part, Module):
            self.buffers[self.device] += self.buffers_of(part)

    def _split_tied(self, name: str, part: Module | Tensor, ties: _TiedGroup) -> bool:
        """Whether one of the parts that share weights with this one could be split, so that less must come along."""
        for other, module in zip(ties.names, ties.modules, strict=True):
            children = children_of(other, module, self.no_split)
            if children:
                at = next(index for index, (item, _) in enumerate(self.waiting) if item == other)
                self.waiting[at : at + 1] = children
                self.waiting.insert(0, (name, part))
                self._find_largest()
                return True
        return False

    def _split(self, name: str, part: Module | Tensor) -> bool:
        """Whether the part could be replaced by its own parts."""
        children = children_of(name, part, self.no_split)
        if not children:
            return False
        self.waiting[:0] = children
        self._find_largest()
        return True

    def _fall_back(self, name: str, part: Module | Tensor, ties: _TiedGroup) -> bool:
        """Whether a smaller part, from further down, fits on a device that would stay empty."""
        if not self.falls_back or self.used[self.device]:
            return False
        limit = self.memory[self.device] - max(self.largest, ties.size)
        found, smaller, rest = fallback_allocate(self.waiting, self.sizes, limit, self.no_split, self.tied)
        if found is None or smaller is None:
            return False
        self.waiting = [(found, smaller), (name, part), *rest]
        return True

    def _next_device(self, name: str, part: Module | Tensor, ties: _TiedGroup) -> None:
        if not self.used[self.device]:
            self.would_need[self.device] = ties.size + self._reserved
        self.used[self.device] += self._reserved
        self.current += 1
        self.waiting.insert(0, (name, part))

    def _leave_out_of_largest(self, name: str) -> None:
        self.largest_names = [layer for layer in self.largest_names if not f"{layer}.".startswith(f"{name}.")]
        if not self.largest_names:
            self._find_largest()

    def _find_largest(self) -> None:
        modules = [(name, part) for name, part in self.waiting if isinstance(part, Module)]
        self.largest, self.largest_names = get_max_layer_size(modules, self.sizes, self.no_split)

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
    tied_params: Sequence[str], module_size: int, module_sizes: Mapping[str, int], modules_to_treat: Sequence[Part]
) -> tuple[int, list[str], list[Module | Tensor]]:
    """The bytes of a module with the modules that hold `tied_params`, their names, and those modules."""
    ties = _ties(tied_params, module_size, module_sizes, modules_to_treat)
    return ties.size, ties.names, ties.modules


def _ties(tied: Sequence[str], size: int, sizes: Mapping[str, int], waiting: Sequence[Part]) -> _TiedGroup:
    names: list[str] = []
    modules: list[Module | Tensor] = []
    for parameter in tied:
        # what was placed already is not waiting, and takes nothing more
        for name, module in waiting:
            if f"{parameter}.".startswith(f"{name}."):
                names.append(name)
                modules.append(module)
                size += sizes[name] - sizes[parameter]
                break
    return _TiedGroup(size, names, modules)


def fallback_allocate(
    modules: list[Part],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: Collection[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Module | Tensor | None, list[Part]]:
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
        if _ties(_tied_elsewhere(name, tied), module_sizes[name], module_sizes, waiting).size <= limit:
            return name, part, _without(name, modules)
        waiting[:0] = children_of(name, part, no_split)
    return None, None, modules


def _without(name: str, parts: Sequence[Part]) -> list[Part]:
    """The parts with the one of this name taken out; what was around it is split into its own parts."""
    left: list[Part] = []
    for other, part in parts:
        if other == name:
            continue
        if name.startswith(f"{other}.") and isinstance(part, Module):
            inner: list[Part] = [*part.named_parameters(recurse=False), *part.named_children()]
            left += _without(name, [(f"{other}.{child}", item) for child, item in inner])
        else:
            left.append((other, part))
    return left


def _add_own_buffers(model: Module, device_map: dict[str, Device]) -> None:
    """The buffers of a module that was split go where its first part went."""
    for name in model.state_dict():
        if covering(name, device_map) is None:
            around = name.rpartition(".")[0]
            near = next((device for item, device in device_map.items() if item.startswith(f"{around}.")), None)
            if near is not None:
                device_map[name] = near
