"""Training with DeepSpeed as it is requested of a launch: what can be known to fail before any worker starts."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate_nb.config.options import deepspeed, parallelism
from accelerate_nb.config.training import TrainingConfig
from accelerate_nb.config.value_types import parse_json
from accelerate_nb.devices import async_io
from accelerate_nb.errors import LaunchError, MissingExtraError


def check(config: TrainingConfig, kind: str) -> None:
    """Raise `LaunchError` for what DeepSpeed can't do, or `MissingExtraError` where it is not installed; `kind` is of the devices."""
    if find_spec("deepspeed") is None:
        raise MissingExtraError(
            "strategy='deepspeed' was requested, and DeepSpeed is not installed: pip install 'accelerate-nb[deepspeed]'"
        )
    if kind == "xla":
        raise LaunchError(
            "strategy='deepspeed' was requested on XLA devices, which DeepSpeed doesn't know. Leave strategy out, or train on GPUs."
        )
    options = config.deepspeed_config or {}
    if said := deepspeed.conflicts(options):
        raise LaunchError(
            f"deepspeed_config has {', '.join(said)} beside deepspeed_config_file, which says it itself. Write it in that file, "
            "and leave it out here."
        )
    path = options.get("deepspeed_config_file")
    if path is not None and not Path(path).expanduser().is_file():
        raise LaunchError(
            f"deepspeed_config_file={path!r} was requested, which is no file at {Path.cwd()}. Pass the path of a ds_config.json."
        )
    _check_disk(options)
    split = {axis for axis in parallelism.sizes(config.parallelism_config or {}) if axis in {"tp", "pp", "cp"}}
    if split:
        raise LaunchError(
            f"strategy='deepspeed' was requested with parallelism_config by {' and '.join(sorted(split))}, along which it does not "
            "spread a training. Leave these degrees out, or take another strategy."
        )


def _check_disk(options: Mapping[str, Any]) -> None:
    """Raise `LaunchError` where weights or states of optimizers are to be on a disk, and can't be."""
    parts = [part for part in ("optimizer", "param") if options.get(f"offload_{part}_device") == "nvme"]
    for part in parts:
        if options.get(f"offload_{part}_nvme_path") in {None, "", "none"}:
            raise LaunchError(
                f"offload_{part}_device='nvme' was requested without its folder. Pass offload_{part}_nvme_path, a folder on a fast disk."
            )
    if (parts or _file_offloads(options.get("deepspeed_config_file"))) and (complaint := async_io.missing_library()):
        raise LaunchError(complaint)


def _file_offloads(path: str | None) -> bool:
    """Whether a file of DeepSpeed's names a disk; one that can't be read is left to the ranks, whose error has its lines."""
    try:
        zero = parse_json(Path(path).expanduser().read_text(encoding="utf-8"))["zero_optimization"] if path else {}
        return any(zero.get(f"offload_{part}", {}).get("device") == "nvme" for part in ("optimizer", "param"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
