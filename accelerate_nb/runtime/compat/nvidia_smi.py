"""NVIDIA's GPUs as `nvidia-smi` reports them: no process becomes a user of a GPU by the query."""

from __future__ import annotations

import functools
import subprocess

import torch
from packaging.version import parse

# GPUs without peer-to-peer transfers, and the driver that reports it to NCCL; an older one lets it hang.
_WITHOUT_PEERS = ("RTX 40",)
_DRIVER_THAT_KNOWS = "550.40.07"


def get_gpu_info() -> tuple[list[str], int]:
    """The names of this machine's GPUs, and how many there are; `OSError` where there is no driver."""
    names = _query("name")
    return names, len(names)


def get_driver_version() -> str:
    """The version of the GPUs' driver; `OSError` where there is none."""
    return _query("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Whether NCCL may send from GPU to GPU directly, as it may unless consumer GPUs have an old driver."""
    try:
        names, count = get_gpu_info()
        if count < 2 or not any(model in name for name in names for model in _WITHOUT_PEERS):
            return True
        return parse(get_driver_version()) >= parse(_DRIVER_THAT_KNOWS)
    except (OSError, subprocess.SubprocessError, ValueError):
        return True  # no driver, or one that doesn't answer as expected: nothing is known against it


@functools.cache
def check_cuda_fp8_capability() -> bool:
    """Whether the first GPU has fp8: compute capability 8.9 or newer; torch decides where the driver's tool is not there."""
    try:
        major, minor = map(int, _query("compute_cap")[0].split("."))
    except (OSError, subprocess.SubprocessError, ValueError):
        major, minor = torch.cuda.get_device_capability()
    return (major, minor) >= (8, 9)


def _query(property_name: str) -> list[str]:
    """One property of each GPU."""
    command = ["nvidia-smi", f"--query-gpu={property_name}", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True, timeout=60).strip().splitlines()
