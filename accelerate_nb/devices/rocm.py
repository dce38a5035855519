"""AMD's GPUs, counted as the kernel's driver lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


class Rocm:
    """AMD's GPUs, which torch calls "cuda" too."""

    name = "cuda"
    label = "GPU"
    build = "hip"
    variable = "CUDA_VISIBLE_DEVICES"

    def count(self, environment: Mapping[str, str]) -> int:
        found = gpus(_NODES)
        for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
            if variable in environment:
                named = [part for part in environment[variable].split(",") if part.strip() not in {"", "-1"}]
                found = min(found, len(named))
        return found


def gpus(nodes: Path) -> int:
    """The number of the driver's nodes that compute: a CPU is a node too, without SIMD units."""
    count = 0
    for properties in nodes.glob("*/properties"):
        try:
            units = re.search(r"^simd_count (\d+)$", properties.read_text(encoding="ascii"), re.MULTILINE)
        except OSError:
            continue  # a container may not read the nodes of GPUs that it was not given
        count += units is not None and int(units[1]) > 0
    return count
