"""The choice of engine, number of workers and devices, with its reason."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.options import parallelism
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.errors import LaunchError
from accelerate_nb.events.run_folder import status_of
from accelerate_nb.events.run_reader import SavedRun, kept_runs
from accelerate_nb.launching.planning import deepspeed_placement, megatron_placement, xla_placement
from accelerate_nb.launching.planning.xla_placement import XlaPlacement

Start = Literal["inline", "supervisor", "fork", "spawn"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The way `size` workers start, whether on the CPU, and the reason in a person's words."""

    start: Start
    size: int
    cpu: bool
    why: str
    # the variables that show workers no other devices than those that were requested
    shows: Mapping[str, str] = field(default_factory=dict)
    # what ranks compute on, in torch's word: "cpu", "cuda", "xla"
    kind: str = "cpu"


def choose_placement(config: RunConfig, devices: AvailableDevices, can_fork: bool) -> Placement:
    """
    The way to start a whole configuration; pure, but for the packages that are installed.

    Of a launch on each of several machines it is the way of this one, with its share of the processes.

    Raises `LaunchError` where it doesn't fit the machine, or the degrees of parallelism don't fit the number of processes.
    """
    launching = config.launching.of_this_node()
    placement = choose(launching, devices, can_fork)
    if config.training.strategy == "fsdp" and placement.kind == "xla":
        raise LaunchError(
            "strategy='fsdp' was requested on XLA devices, which torch's FSDP doesn't know. "
            "Leave strategy out, so that each rank has the whole model, or train on GPUs."
        )
    if not (launching.names_hosts or config.launching.is_on_each_node):
        check_training(config, placement)
    return placement


def check_training(config: RunConfig, placement: Placement) -> None:
    """Raise `LaunchError` where the strategy or the degrees of parallelism don't fit a placement."""
    if config.training.strategy == "deepspeed":
        deepspeed_placement.check(config.training, placement.kind)
    if config.training.strategy == "megatron":
        megatron_placement.check(config.training, placement.kind, placement.size)
    degrees = config.training.parallelism_config or {}
    if config.training.strategy not in {None, "deepspeed"} and (parts := parallelism.sizes(degrees).get("sp")):
        raise LaunchError(
            f"parallelism_config={{sp_size: {parts}}} was requested with strategy={config.training.strategy!r}, but DeepSpeed alone "
            "splits sequences so. Pass strategy='deepspeed', or cp_size for torch's split."
        )
    if (number := parallelism.processes(degrees)) not in {1, placement.size}:
        axes = ", ".join(f"{axis}_size: {degree}" for axis, degree in parallelism.sizes(degrees).items())
        raise LaunchError(
            f"parallelism_config={{{axes}}} was requested, which takes {number} processes, but this would be a run of "
            f"{placement.size}. Pass num_processes={number}, or other degrees."
        )


def choose(config: LaunchingConfig, devices: AvailableDevices, can_fork: bool) -> Placement:
    """
    The way to start that fits the settings and the machine; pure.

    Raises `LaunchError` where they don't fit together.
    """
    through = xla_placement.requested_devices(config, devices)
    computing = _computing(config, devices) if through is None else xla_placement.computing(config, through)
    start, why = _start(config, computing.size, can_fork)
    if through is not None:
        xla_placement.check_start(start, through)
    elif start == "inline" and computing.shows:
        raise LaunchError(
            f"gpu_ids={config.gpu_ids!r} was requested with engine='inline', but this process has its devices already. "
            "Leave one of them out."
        )
    is_on_cpu, why = computing.kind == "cpu", f"{computing.where}; {why}"
    return Placement(start, computing.size, is_on_cpu, why, computing.shows, computing.kind)


def _computing(config: LaunchingConfig, devices: AvailableDevices) -> XlaPlacement:
    """The number of ranks on the devices that torch itself computes on."""
    if config.names_hosts:
        # which they are is known once their agents are there
        return XlaPlacement(config.num_processes or 1, "cpu", "on the hosts that are named")
    seen = _seen(config, devices)
    size = config.num_processes or max(1, 0 if config.cpu else seen.count)
    if config.cpu:
        return XlaPlacement(size, "cpu", f"{size} on the CPU")
    if seen.count == 0:
        processes = "process" if size == 1 else "processes"
        return XlaPlacement(size, "cpu", f"{size} {processes}: no GPU found, using the CPU")
    if size > seen.count:
        raise LaunchError(
            f"num_processes={size} was requested, but {_found(config, devices, seen)}. "
            f"Use at most {seen.count}, or pass cpu=True."
        )
    return XlaPlacement(size, devices.kind, f"{size} of {seen.count} {devices.label}s", devices.showing(config.gpu_ids))


def accelerates_word(choice: Placement, devices: AvailableDevices) -> str:
    """The name of such a run in Accelerate's files."""
    if choice.kind == "xla":
        return "XLA"
    if choice.size == 1:
        return "NO"
    if choice.cpu:
        return "MULTI_CPU"
    return "MULTI_GPU" if devices.kind == "cuda" else f"MULTI_{devices.kind.upper()}"


def _seen(config: LaunchingConfig, devices: AvailableDevices) -> AvailableDevices:
    """The devices that workers see."""
    if config.cpu or config.gpu_ids == "all":
        return devices.only(config.gpu_ids)
    if not devices.count:
        raise LaunchError(
            f"gpu_ids={config.gpu_ids!r} was requested, but torch finds no GPU on this machine (`accelerate-nb env` shows what "
            "it finds). Leave gpu_ids out to compute on the CPU."
        )
    if missing := devices.missing(config.gpu_ids):
        raise LaunchError(
            f"gpu_ids={config.gpu_ids!r} was requested, but this machine has {devices.numbered}, and no "
            f"{' and no '.join(missing)}. Name others, or pass gpu_ids='all'."
        )
    return devices.only(config.gpu_ids)


def _found(config: LaunchingConfig, devices: AvailableDevices, seen: AvailableDevices) -> str:
    number = f"{seen.count} {devices.label}{'s' if seen.count > 1 else ''}"
    return f"this machine has {number}" if config.gpu_ids == "all" else f"gpu_ids={config.gpu_ids!r} shows {number}"


def _start(config: LaunchingConfig, size: int, can_fork: bool) -> tuple[Start, str]:
    if config.engine == "inline":
        return _inline(config, size)
    if config.start_method == "auto":
        if can_fork:
            return "supervisor", "forked by a supervisor"
        return "spawn", "fresh Pythons: this system can't fork"
    if config.start_method != "spawn" and not can_fork:
        raise LaunchError(
            f"start_method={config.start_method!r} was requested, but this system can't fork processes. "
            "Leave start_method out, or pass start_method='spawn'."
        )
    return config.start_method, f"start_method={config.start_method!r} was requested"


def _inline(config: LaunchingConfig, size: int) -> tuple[Start, str]:
    if size > 1:
        raise LaunchError(
            f"engine='inline' was requested with num_processes={size}, but this process is only one. "
            "Pass num_processes=1, or leave engine out."
        )
    if config.timeout is not None:
        raise LaunchError(
            f"timeout={config.timeout:g} was requested with engine='inline', where nothing can end the function from outside. "
            "Leave one of them out."
        )
    if config.num_cpu_threads_per_process is not None:
        raise LaunchError(
            f"num_cpu_threads_per_process={config.num_cpu_threads_per_process} was requested with engine='inline', but this "
            "process has its threads already. Leave one of them out."
        )
    return "inline", "in this very process"


def devices_of(placement: Placement, environment: Mapping[str, str]) -> tuple[str, ...]:
    """
    The names of the accelerators that a placement takes, `cuda:0` and so on as the machine counts them; none on the CPU.

    >>> devices_of(Placement("supervisor", 2, False, "", {"CUDA_VISIBLE_DEVICES": "4,5"}, kind="cuda"), {})
    ('cuda:4', 'cuda:5')
    """
    if placement.kind == "cpu":
        return ()
    visible = {**environment, **placement.shows}.get("CUDA_VISIBLE_DEVICES", "") if placement.kind == "cuda" else ""
    numbers = [word.strip() for word in visible.split(",") if word.strip()] or [*map(str, range(placement.size))]
    return tuple(f"{placement.kind}:{number}" for number in numbers[: placement.size])


def taken(devices: Sequence[str], parent: Path) -> Iterator[str]:
    """A sentence for each detached run among those in `parent` that holds some of these devices."""
    if not devices:
        return
    for run in kept_runs(parent):
        if run.is_detached and not run.is_over and (both := [name for name in _held_by(run) if name in devices]):
            since = time.strftime("%H:%M on %Y-%m-%d", time.localtime(run.started))
            yield (
                f"{', '.join(both)} {'is' if len(both) == 1 else 'are'} taken by the detached run {run.name!r} since {since} "
                f"({run.folder}). Choose others with gpu_ids=, or stop it: accelerate_nb.attach({run.folder.name!r}).stop()."
            )


def _held_by(run: SavedRun) -> list[str]:
    status = status_of(run.folder) or {}
    devices = status.get("devices")
    return [*map(str, devices)] if status.get("host") == socket.gethostname() and isinstance(devices, list) else []
