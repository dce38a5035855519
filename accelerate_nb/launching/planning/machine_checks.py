"""What of this machine would get in a training's way, looked at before there is any worker."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from accelerate_nb.config.environment import already_launched, runs_folder
from accelerate_nb.config.run import RunConfig, differing
from accelerate_nb.devices import xla
from accelerate_nb.devices.base import Devices
from accelerate_nb.devices.build import torch_is_built_for
from accelerate_nb.devices.driver import Driver, driver
from accelerate_nb.devices.probe import probe
from accelerate_nb.events.checks import Check
from accelerate_nb.launching.preflight import look_ahead

_SHARED = Path("/dev/shm")
_MIB = 1 << 20
# Below the first, a loader's batches and NCCL's own buffers hardly fit; Docker gives 64 MiB where nothing else is said.
_TOO_LITTLE_SHARED, _LITTLE_SHARED = 16 * _MIB, 256 * _MIB
# A worker has some dozens of files open, and each batch that a loader's processes send is one more.
_FEW_FILES = 1024
_LITTLE_DISK = 64 * _MIB
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def look(config: RunConfig, environment: Mapping[str, str], told: Callable[[Check], None]) -> list[Check]:
    """
    Look at the machine; `told` hears of each check when it is made. One that passed may have advice all the same.

    >>> [check.name for check in look(RunConfig(), os.environ, print)]
    ['environment', 'settings', 'torch', 'shared memory', 'open files', 'folder']
    """
    devices = probe(environment)
    said = config.launching.folder
    folder = Path(said).expanduser() if said else runs_folder(environment)
    found = [
        of_environment(environment),
        of_settings(config, devices),
        of_torch(devices, driver(), environment) if devices.kind != "xla" else of_xla(devices, xla.holders()),
        of_shared_memory(shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None),
        of_open_files(_open_files()),
        of_folder(folder),
        *([of_port(config.launching.port)] if config.launching.port else []),
    ]
    for check in found:
        told(check)
    return found


def of_environment(environment: Mapping[str, str]) -> Check:
    """Whether variables of a launch are left here, which make every launcher take this process for a worker."""
    title = "The environment"
    left = [name for name in _OF_A_LAUNCHER if name in environment]
    if not left:
        return Check("environment", title, "passed", "no variables of another launch")
    words = ", ".join(f"{name}={environment[name]}" for name in left)
    advice = f"unset {' '.join(left)}"
    if already_launched(environment):
        text = f"{words} are set: launchers and Accelerators take this process for a worker"
        return Check("environment", title, "failed", text, advice)
    return Check("environment", title, "passed", f"{words} set, which workers get anew", advice)


def of_settings(config: RunConfig, devices: Devices) -> Check:
    """Whether the settings fit this machine, and each other."""
    outlook = look_ahead(differing(config), devices, can_fork=hasattr(os, "fork"))
    grave = [one.text for one in outlook.objections if one.grave]
    slight = " ".join(one.text for one in outlook.objections if not one.grave)
    if grave or outlook.choice is None:
        return Check("settings", "The settings", "failed", " ".join(grave))
    return Check("settings", "The settings", "passed", outlook.choice.why, slight)


def of_torch(devices: Devices, nvidia: Driver | None, environment: Mapping[str, str]) -> Check:
    """Whether torch is there, and was built for the GPUs that are."""
    title = "torch"
    if find_spec("torch") is None:
        return Check("torch", title, "failed", "torch is not installed for this Python", "pip install torch")
    gpus = 0 if nvidia is None else len(nvidia.gpus)
    text = f"it sees {devices.count} of them" if devices.count else "it computes on the CPU"
    if not gpus or devices.count:
        return Check("torch", title, "passed", f"built for {devices.label}s; {text}" if devices.count else text)
    if not torch_is_built_for("cuda"):
        text = f"this machine has {gpus} NVIDIA GPU{'s' if gpus > 1 else ''}, and torch was built without CUDA"
        return Check(
            "torch", title, "failed", text, "Install a build for CUDA: https://pytorch.org/get-started/locally"
        )
    said = environment.get("CUDA_VISIBLE_DEVICES")
    text = f"this machine has {gpus} NVIDIA GPU{'s' if gpus > 1 else ''}, and CUDA_VISIBLE_DEVICES={said!r} hides them"
    return Check("torch", title, "passed", text, "unset CUDA_VISIBLE_DEVICES where they should be used")


def of_xla(devices: Devices, holders: Sequence[int]) -> Check:
    """Whether torch_xla has devices to compute on, and nobody else has them."""
    name, title, found = "torch", "torch_xla", devices.xla
    if found is None or found.trouble:
        return Check(name, title, "failed", "" if found is None else found.trouble)
    text = f"it computes on {devices.count} {devices.label}{'s' if devices.count > 1 else ''}"
    if found.device != "TPU" or not holders:
        return Check(name, title, "passed", text)
    who = ", ".join(map(str, holders))
    advice = "Restart the notebook's kernel, or end what computes there: chips belong to one process at a time"
    return Check(name, title, "failed", f"the TPU's chips are held by process {who}", advice)


def of_shared_memory(free: int | None) -> Check:
    """Whether a loader's processes have the memory through which they send batches."""
    name, title = "shared memory", "Shared memory"
    if free is None:
        return Check(name, title, "passed", "this system has no /dev/shm to run full")
    text = f"{free / _MIB:,.0f} MiB are free in /dev/shm"
    advice = (
        "Data loaders with processes of their own, and NCCL, need more: start the container with --shm-size=8g or "
        "--ipc=host (in Kubernetes an emptyDir with medium: Memory at /dev/shm), or use num_workers=0"
    )
    if free < _TOO_LITTLE_SHARED:
        return Check(name, title, "failed", text, advice)
    return Check(name, title, "passed", text, advice if free < _LITTLE_SHARED else "")


def of_open_files(limit: int | None) -> Check:
    """Whether a process may have as many files open as loaders want."""
    name, title = "open files", "Open files"
    if limit is None:
        return Check(name, title, "passed", "no limit")
    advice = "ulimit -n 65535 before the notebook server or the launch starts" if limit < _FEW_FILES else ""
    return Check(name, title, "passed", f"{limit} for each process", advice)


def of_folder(folder: Path) -> Check:
    """Whether the runs' folder can be written to."""
    title = "The folder of runs"
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check("folder", title, "failed", f"{folder} can't be written to", "Choose another with --folder")
    free = shutil.disk_usage(there).free
    text = f"{folder}, {free / (1 << 30):,.1f} GiB free"
    if free < _LITTLE_DISK:
        return Check("folder", title, "failed", text, "Make space, or choose another with --folder")
    return Check("folder", title, "passed", text)


def of_port(port: int) -> Check:
    """Whether workers can meet at the port that was asked for."""
    title = "The port"
    with socket.socket() as meeting:
        meeting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            meeting.bind(("127.0.0.1", port))
        except OSError as error:
            text = f"{port} can't be used: {error.strerror}{_holder(port)}"
            return Check("port", title, "failed", text, "Leave the port out: any free one is taken")
    return Check("port", title, "passed", f"{port} is free")


def _holder(port: int) -> str:
    """Who listens at a port, where that can be seen."""
    import psutil

    try:
        listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        pid = next(one.pid for one in listening if one.laddr and one.laddr.port == port and one.pid)
        return f", {psutil.Process(pid).name()} (process {pid}) listens there"
    except (psutil.Error, StopIteration):
        return ""


def _open_files() -> int | None:
    if find_spec("resource") is None:
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit
