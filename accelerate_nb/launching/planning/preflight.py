"""The preflight check of a launch: settings that don't fit this machine, or each other."""

import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate_nb.config.environment import already_launched, runs_folder
from accelerate_nb.config.run_config import RunConfig, all_settings, differing, resolve
from accelerate_nb.devices.gpus import torch_is_built_for
from accelerate_nb.devices.nvml import Driver, driver
from accelerate_nb.devices.probe import AvailableDevices, probe
from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.events.event_types import CheckResult
from accelerate_nb.failures.process_limits import soft_limit
from accelerate_nb.launching.planning.placement import Placement, choose_placement

_SHARED = Path("/dev/shm")
_MIB = 1 << 20
# Below the first, a loader's batches and NCCL's own buffers hardly fit; Docker gives 64 MiB where nothing else is set.
_TOO_LITTLE_SHARED, _LITTLE_SHARED = 16 * _MIB, 256 * _MIB
# A worker has some dozens of files open, and each batch that a loader's processes send is one more.
_FEW_FILES = 1024
_LITTLE_DISK = 64 * _MIB
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class PreflightIssue:
    """A reason why a launch would fail (`grave`), or be slower than it need be; `name` is the setting to change."""

    name: str | None
    text: str
    grave: bool = True


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """The result of a preflight: the configuration, its placement, and the objections to it."""

    config: RunConfig | None
    choice: Placement | None
    objections: tuple[PreflightIssue, ...]

    @property
    def possible(self) -> bool:
        """Whether there is no grave objection."""
        return not any(objection.grave for objection in self.objections)


def run_preflight(settings: Mapping[str, Any], devices: AvailableDevices, can_fork: bool) -> PreflightReport:
    """Check a launch with these settings on a machine with these devices; pure, raises nothing, with the texts of the launch's own errors."""
    try:
        config = resolve(settings, {})
    except AccelerateNbError as error:
        # each by itself; an error of several together stands at the setting that it begins with
        together = PreflightIssue(_named_in(str(error)), str(error))
        alone = []
        for name, value in settings.items():
            try:
                resolve({name: value}, {})
            except AccelerateNbError as own:
                alone.append(PreflightIssue(name, str(own)))
        others = [issue for issue in alone if issue.name != together.name and issue.text != together.text]
        issues = alone if together.name is None and alone else [together, *others]
        return PreflightReport(None, None, tuple(issues))
    try:
        choice = choose_placement(config, devices, can_fork)
    except AccelerateNbError as error:
        return PreflightReport(config, None, (PreflightIssue(_named_in(str(error)), str(error)),))
    return PreflightReport(config, choice, _advice(config, choice, devices))


def _named_in(text: str) -> str | None:
    """The setting that an error's text begins with, as in "num_processes=8 was requested"."""
    return next((setting.name for setting in all_settings() if text.startswith(f"{setting.name}=")), None)


def _advice(config: RunConfig, choice: Placement, devices: AvailableDevices) -> tuple[PreflightIssue, ...]:
    """Objections to what works, and is not what one would want."""
    found = []
    if choice.cpu and choice.size > devices.cores:
        cores = f"{devices.cores} CPU core{'s' if devices.cores > 1 else ''}"
        text = f"{choice.size} processes would share {cores}: that works, and is no faster than fewer."
        found.append(PreflightIssue("num_processes", text, grave=False))
    if choice.cpu and config.training.mixed_precision == "fp16":
        text = "On the CPU fp16 is seldom faster, and overflows as on a GPU: bf16 has the range of float32."
        found.append(PreflightIssue("mixed_precision", text, grave=False))
    if choice.kind == "xla" and config.training.mixed_precision == "fp16":
        text = "TPUs compute in bf16, and on fp16 they overflow as a GPU does, without being faster: bf16 has the range of float32."
        found.append(PreflightIssue("mixed_precision", text, grave=False))
    options = {"fsdp": "fsdp_config", "deepspeed": "deepspeed_config", "megatron": "megatron_lm_config"}
    for strategy, name in options.items():
        if getattr(config.training, name) and config.training.strategy != strategy:
            text = (
                f"These are options of strategy={strategy!r}, which was not requested: every rank has the whole model."
            )
            found.append(PreflightIssue(name, text, grave=False))
    return tuple(found)


def run_checks(
    config: RunConfig, environment: Mapping[str, str], on_check: Callable[[CheckResult], None]
) -> list[CheckResult]:
    """Check the machine; `on_check` is called with each check when it is made. One that passed may have advice all the same."""
    devices = probe(environment)
    folder_setting = config.launching.folder
    folder = Path(folder_setting).expanduser() if folder_setting else runs_folder(environment)
    found = [
        of_environment(environment),
        of_settings(config, devices),
        of_torch(devices, driver(), environment) if devices.kind != "xla" else of_runtime(devices, devices.holders()),
        of_shared_memory(shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None),
        of_open_files(soft_limit("RLIMIT_NOFILE")),
        of_folder(folder),
        *([of_port(config.launching.port)] if config.launching.port else []),
    ]
    for check in found:
        on_check(check)
    return found


def of_environment(environment: Mapping[str, str]) -> CheckResult:
    """Whether variables of a launch are left in the environment, which make every launcher take this process for a worker."""
    title = "The environment"
    left = [name for name in _OF_A_LAUNCHER if name in environment]
    if not left:
        return CheckResult("environment", title, "passed", "no variables of another launch")
    words = ", ".join(f"{name}={environment[name]}" for name in left)
    advice = f"unset {' '.join(left)}"
    if already_launched(environment):
        text = f"{words} are set: launchers and Accelerators take this process for a worker"
        return CheckResult("environment", title, "failed", text, advice)
    return CheckResult("environment", title, "passed", f"{words} set, which workers get anew", advice)


def of_settings(config: RunConfig, devices: AvailableDevices) -> CheckResult:
    """Whether the settings fit this machine, and each other."""
    outlook = run_preflight(differing(config), devices, can_fork=hasattr(os, "fork"))
    grave = [objection.text for objection in outlook.objections if objection.grave]
    slight = " ".join(objection.text for objection in outlook.objections if not objection.grave)
    if grave or outlook.choice is None:
        return CheckResult("settings", "The settings", "failed", " ".join(grave))
    return CheckResult("settings", "The settings", "passed", outlook.choice.why, slight)


def of_torch(devices: AvailableDevices, nvidia: Driver | None, environment: Mapping[str, str]) -> CheckResult:
    """Whether torch is there, and was built for the GPUs that are."""
    title = "torch"
    if find_spec("torch") is None:
        return CheckResult("torch", title, "failed", "torch is not installed for this Python", "pip install torch")
    gpus = 0 if nvidia is None else len(nvidia.gpus)
    text = f"it sees {devices.count} of them" if devices.count else "no GPU found, using the CPU"
    if not gpus or devices.count:
        return CheckResult("torch", title, "passed", f"built for {devices.label}s; {text}" if devices.count else text)
    there = f"this machine has {gpus} NVIDIA GPU{'s' if gpus > 1 else ''}"
    if not torch_is_built_for("cuda"):
        text = f"{there}, and torch was built without CUDA"
        advice = "Install a build for CUDA: https://pytorch.org/get-started/locally"
        return CheckResult("torch", title, "failed", text, advice)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    text = f"{there}, and CUDA_VISIBLE_DEVICES={visible!r} hides them"
    return CheckResult("torch", title, "passed", text, "unset CUDA_VISIBLE_DEVICES where they should be used")


def of_runtime(devices: AvailableDevices, holders: Sequence[int]) -> CheckResult:
    """Whether torch_xla has devices to compute on, and nobody else has them."""
    name, title = "torch", "torch_xla"
    if devices.trouble:
        return CheckResult(name, title, "failed", devices.trouble)
    text = f"it computes on {devices.count} {devices.label}{'s' if devices.count > 1 else ''}"
    if not holders:
        return CheckResult(name, title, "passed", text)
    who = ", ".join(map(str, holders))
    advice = "Restart the notebook's kernel, or end what computes there: chips belong to one process at a time"
    return CheckResult(name, title, "failed", f"the TPU's chips are held by process {who}", advice)


def of_shared_memory(free: int | None) -> CheckResult:
    """Whether a loader's processes have the memory through which they send batches."""
    name, title = "shared memory", "Shared memory"
    if free is None:
        return CheckResult(name, title, "passed", "this system has no /dev/shm to run full")
    text = f"{free / _MIB:,.0f} MiB are free in /dev/shm"
    advice = (
        "Data loaders with processes of their own, and NCCL, need more: start the container with --shm-size=8g or "
        "--ipc=host (in Kubernetes an emptyDir with medium: Memory at /dev/shm), or use num_workers=0"
    )
    if free < _TOO_LITTLE_SHARED:
        return CheckResult(name, title, "failed", text, advice)
    return CheckResult(name, title, "passed", text, advice if free < _LITTLE_SHARED else "")


def of_open_files(limit: int | None) -> CheckResult:
    """Whether a process may have as many files open as loaders want."""
    name, title = "open files", "Open files"
    if limit is None:
        return CheckResult(name, title, "passed", "no limit")
    advice = "ulimit -n 65535 before the notebook server or the launch starts" if limit < _FEW_FILES else ""
    return CheckResult(name, title, "passed", f"{limit} for each process", advice)


def of_folder(folder: Path) -> CheckResult:
    """Whether the runs' folder can be written to."""
    title = "The folder of runs"
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return CheckResult("folder", title, "failed", f"{folder} can't be written to", "Choose another with --folder")
    free = shutil.disk_usage(there).free
    text = f"{folder}, {free / (1 << 30):,.1f} GiB free"
    if free < _LITTLE_DISK:
        return CheckResult("folder", title, "failed", text, "Make space, or choose another with --folder")
    return CheckResult("folder", title, "passed", text)


def of_port(port: int) -> CheckResult:
    """Whether the requested port can be used for the rendezvous."""
    title = "The port"
    with socket.socket() as rendezvous:
        rendezvous.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            rendezvous.bind(("127.0.0.1", port))
        except OSError as error:
            import psutil

            holder = ""
            # the process that listens there, where that can be seen
            with suppress(psutil.Error, StopIteration):
                listening = (item for item in psutil.net_connections("tcp") if item.status == psutil.CONN_LISTEN)
                pid = next(item.pid for item in listening if item.laddr and item.laddr.port == port and item.pid)
                holder = f", {psutil.Process(pid).name()} (process {pid}) listens there"
            text = f"{port} can't be used: {error.strerror}{holder}"
            return CheckResult("port", title, "failed", text, "Leave the port out: any free one is taken")
    return CheckResult("port", title, "passed", f"{port} is free")
