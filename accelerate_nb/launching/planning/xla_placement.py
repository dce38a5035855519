"""Placement on torch_xla's devices: how many ranks, on which devices, and which settings don't fit them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.devices.xla import XlaDevices
from accelerate_nb.errors import LaunchError


def requested_devices(config: LaunchingConfig, devices: AvailableDevices) -> XlaDevices | None:
    """
    The devices that ranks compute on through torch_xla; `None` where they don't.

    Raises `LaunchError` where they are requested, and can't be used.
    """
    if config.cpu and config.engine == "xla":
        raise LaunchError(
            "engine='xla' was requested with cpu=True, which means PyTorch's own CPU, without torch_xla. Leave one of them "
            "out; torch_xla computes on the CPU with PJRT_DEVICE=CPU in the environment."
        )
    if config.engine == "xla" and devices.xla is None:
        raise LaunchError(
            "engine='xla' was requested, but torch_xla is not installed. pip install 'accelerate-nb[tpu]', or leave engine out."
        )
    if config.cpu or (config.engine != "xla" and devices.kind != "xla"):
        return None
    found = devices.xla
    if found is not None and found.trouble:
        raise LaunchError(found.trouble)
    return found


def computing(config: LaunchingConfig, found: XlaDevices) -> XlaPlacement:
    """
    The number of ranks on these devices; pure.

    Raises `LaunchError` for what torch_xla does not do there.
    """
    if config.gpu_ids != "all":
        raise LaunchError(
            f"gpu_ids={config.gpu_ids!r} was requested, but {found.label}s are not chosen by number: torch_xla takes all of them, "
            "or one. Leave gpu_ids out; num_processes=1 takes one."
        )
    return _on_cpu(config, found) if found.device == "CPU" else _on_tpu(config, found)


def check_start(start: str, found: XlaDevices) -> None:
    """
    Raise `LaunchError` where workers that start so could not have the devices, because this process has.

    A TPU's chips belong to one process at a time; the CPU does not, but a runtime that was awake does not outlive a fork.
    """
    if not found.held or start == "inline":
        return
    if found.device == "TPU":
        raise LaunchError(
            f"A launch on {found.label}s was requested, but {found.held}, and no other process can have them. Restart the "
            "kernel, and launch before any cell calls torch_xla.device(), makes an Accelerator or uses the TPU otherwise."
        )
    if start == "fork":
        raise LaunchError(
            f"start_method='fork' was requested, but {found.held}, and does not work in a process that is forked from there. "
            "Leave start_method out: the workers then come from a process in which it sleeps."
        )


def _on_cpu(config: LaunchingConfig, found: XlaDevices) -> XlaPlacement:
    size = config.num_processes or found.count
    where = _several(size, found) + ("" if found.requested else ", through torch_xla: there is no TPU")
    return XlaPlacement(size, "xla", where, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"})


def _on_tpu(config: LaunchingConfig, found: XlaDevices) -> XlaPlacement:
    size = config.num_processes or found.count
    if size > found.count:
        raise LaunchError(
            f"num_processes={size} was requested, but this machine has {_several(found.count, found)}. "
            f"Use {_possible_sizes(found)}, or pass cpu=True."
        )
    if size not in {1, found.count}:
        raise LaunchError(
            f"num_processes={size} was requested, but torch_xla's processes find each other on all of this machine's "
            f"{_several(found.count, found)} only. Use {_possible_sizes(found)}."
        )
    where = f"{size} of {_several(found.count, found)}"
    return XlaPlacement(size, "xla", where, {"PJRT_DEVICE": "TPU"})


def _possible_sizes(found: XlaDevices) -> str:
    return f"{found.count} or 1" if found.count > 1 else "1"


def _several(number: int, found: XlaDevices) -> str:
    return f"{number} {found.label}{'s' if number != 1 else ''}"


@dataclass(frozen=True, slots=True)
class XlaPlacement:
    """`size` ranks, the `kind` of their devices in torch's word, and `where` that is, in a person's."""

    size: int
    kind: str
    where: str
    # the variables that show workers no other devices than those that were requested
    shows: Mapping[str, str] = field(default_factory=dict)
