"""Intel's GPUs, counted as the kernel's driver lists them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_NODES = Path("/sys/class/drm")
_INTEL = "0x8086"


class Xpu:
    """Intel's GPUs, as `ZE_AFFINITY_MASK` lets a process see them."""

    name = "xpu"
    label = "XPU"
    build = "xpu"
    variable = "ZE_AFFINITY_MASK"

    def count(self, environment: Mapping[str, str]) -> int:
        found = gpus(_NODES)
        mask = environment.get("ZE_AFFINITY_MASK")
        if not mask:
            return found
        return min(found, len({entry.strip().partition(".")[0] for entry in mask.split(",")}))


def gpus(nodes: Path) -> int:
    """The number of render nodes of Intel."""
    return sum(_vendor(node) == _INTEL for node in nodes.glob("renderD*"))


def _vendor(node: Path) -> str:
    try:
        return (node / "device" / "vendor").read_text(encoding="ascii").strip()
    except OSError:
        return ""
