"""The configuration file that Accelerate's tools write without a question."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from accelerate_nb.config.hf.files import default_path
from accelerate_nb.errors import ConfigurationError

_PRECISIONS = ("no", "fp16", "bf16", "fp8")


def write_basic(
    mixed_precision: str, file: str | os.PathLike[str] | None, *, distributed_type: str, num_processes: int, cpu: bool
) -> Path | None:
    """
    Write a configuration for one machine, in Accelerate's format; `None` where there is a file already, which stays as it is.

    The default path is the one that Accelerate's tools and this package's launchers read.
    """
    path = default_path(os.environ) if file is None else Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return None
    content = basic(mixed_precision, distributed_type=distributed_type, num_processes=num_processes, cpu=cpu)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def basic(mixed_precision: str, *, distributed_type: str, num_processes: int, cpu: bool) -> dict[str, Any]:
    """The content that Accelerate's tools write for a machine as it is."""
    if mixed_precision.lower() not in _PRECISIONS:
        raise ConfigurationError(
            f"mixed_precision={mixed_precision!r} was to be written. It should be one of {', '.join(_PRECISIONS)}."
        )
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": distributed_type,
        "downcast_bf16": False,
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed_precision.lower(),
        "num_machines": 1,
        "num_processes": num_processes,
        "rdzv_backend": "static",
        "same_network": False,
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
        "use_cpu": cpu,
    }
