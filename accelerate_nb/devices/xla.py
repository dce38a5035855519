"""What torch_xla computes on: TPUs, and the CPU where that is asked for; counted without waking its runtime."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from accelerate_nb.config.environment import asks_for_tpu

_PCI = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
# Google's numbers for its chips, as torch_xla 2.9 knows them (`torch_xla/_internal/tpu.py`), with the devices on each.
_CORES = {
    "0x0027": 2,  # v2 and v3
    "0x005e": 1,  # v4
    "0x0062": 1,  # v5p
    "0x0063": 1,  # v5e
    "0x006f": 1,  # v6e
    "0x0076": 1,  # 7x
}


@dataclass(frozen=True, slots=True)
class Found:
    """What torch_xla would compute on: `device` as `PJRT_DEVICE` names it, how many, and how many one process drives."""

    device: str
    count: int
    per_process: int = 1


class Xla:
    """What torch_xla computes on, where it is installed."""

    name = "xla"
    label = "TPU core"
    build = ""
    variable = ""

    def count(self, environment: Mapping[str, str]) -> int:
        found = find(environment)
        return 0 if found is None else found.count


def find(environment: Mapping[str, str], pci: Path = _PCI) -> Found | None:
    """What a process with this environment would compute on through torch_xla; `None` for nothing."""
    if not is_installed():
        return None
    asked = environment.get("PJRT_DEVICE", "").upper()
    if asked == "CPU":
        count = int(environment.get("CPU_NUM_DEVICES") or 1)
        return Found("CPU", count, count)
    if asked not in {"", "TPU"}:
        return None
    chips = tpu_chips(pci)
    if chips:
        return Found("TPU", sum(chips), max(chips))
    return Found("TPU", 0) if asked or asks_for_tpu(environment) else None


def tpu_chips(pci: Path = _PCI) -> list[int]:
    """How many devices each TPU chip of this machine is."""
    return [cores for folder in pci.glob("*") if (cores := _cores(folder))]


def is_installed() -> bool:
    """Whether torch_xla can be imported."""
    return find_spec("torch_xla") is not None


def is_awake() -> bool:
    """Whether torch_xla's runtime holds its devices in this process; asking does not wake it."""
    library = sys.modules.get("_XLAC")
    return library is not None and bool(library._xla_runtime_is_initialized())


def wake(local_rank: int, local_size: int) -> None:
    """
    Have torch_xla's runtime begin in this process, the `local_rank`-th of `local_size` on this machine, each with its chips.

    Does what `torch_xla.launch` does in each process that it starts (`torch_xla/_internal/pjrt.py`), once.
    """
    if is_awake():
        return
    from torch_xla._internal import pjrt

    if local_size > 1:
        pjrt.initialize_multiprocess(local_rank, local_size)
    else:
        pjrt._initialize_single_process(local_rank, local_size)
    os.environ["PJRT_DEVICE"] = str(pjrt.runtime.device_type())


def _cores(folder: Path) -> int:
    try:
        vendor, device = ((folder / name).read_text(encoding="ascii").strip() for name in ("vendor", "device"))
    except OSError:
        return 0
    return _CORES.get(device, 0) if vendor == _GOOGLE else 0
