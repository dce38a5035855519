"""Features that a configuration file can request and that are not supported yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_nb.config import tpu_pods
from accelerate_nb.config.did_you_mean import did_you_mean
from accelerate_nb.errors import ConfigurationError, NotYetError

# Accelerate's words for the ways to train that are offered here.
_OFFERED = frozenset(
    {"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MPS", "FSDP", "DEEPSPEED", "MEGATRON_LM", *tpu_pods.WORDS}
)
# The packages for fp8 that are offered here.
_FP8 = frozenset({"AO", "AUTO", "NO"})
# Those for the ways that would silently be left out, with what people call them.
_UNSUPPORTED = {
    "MULTI_HPU": "Gaudi accelerators",
    "MULTI_MLU": "MLUs",
    "MULTI_MUSA": "MUSA's GPUs",
    "MULTI_NEURON": "Neuron accelerators",
    "MULTI_NPU": "NPUs",
    "MULTI_SDAA": "SDAA's accelerators",
    "TP": "tensor parallelism",
}


def first_unsupported(content: Mapping[str, Any]) -> str | None:
    """
    The first feature of this file's content that is not supported yet, in words; `None` where there is none.

    >>> first_unsupported({"distributed_type": "MULTI_NPU", "num_processes": 8})
    'NPUs (distributed_type: MULTI_NPU)'
    """
    if (environment := content.get("compute_environment") or "LOCAL_MACHINE") != "LOCAL_MACHINE":
        return f"a machine other than this one (compute_environment: {environment})"
    distributed_type = _distributed_type(content)
    if distributed_type in _UNSUPPORTED:
        return f"{_UNSUPPORTED[distributed_type]} (distributed_type: {distributed_type})"
    if (package := _fp8_package(content)) not in _FP8:
        return f"fp8 by {package} (fp8_config: backend)"
    if split := _split(content.get("parallelism_config"), distributed_type):
        return f"a mesh that no strategy has ({', '.join(split)})"
    return None


def refuse(content: Mapping[str, Any], where: str = "The configuration file") -> None:
    """
    Raise `NotYetError` for a feature that is not supported yet, and `ConfigurationError` for an unknown `distributed_type`.

    A launch does this; a file that requests it is read and kept all the same.
    """
    distributed_type = _distributed_type(content)
    if (what := first_unsupported(content)) is not None:
        raise NotYetError(
            f"{where} requests {what}, which is not offered here yet. Pass config_file='' to launch without the file."
        )
    known = {*_OFFERED, *_UNSUPPORTED}
    if distributed_type not in known:
        suggestion = did_you_mean(distributed_type, known, f"Write one of {', '.join(sorted(_OFFERED))}.")
        raise ConfigurationError(f"{where} has distributed_type: {distributed_type}, which is unknown. {suggestion}")


def _distributed_type(content: Mapping[str, Any]) -> str:
    # YAML reads a bare `NO` as False
    return str(content.get("distributed_type") or "NO").upper()


def _fp8_package(content: Mapping[str, Any]) -> str:
    """The package that is to compute in fp8, where that is requested; "AUTO" takes an installed one."""
    fp8_config = content.get("fp8_config")
    wanted = None
    if isinstance(fp8_config, Mapping) and content.get("mixed_precision") == "fp8":
        wanted = fp8_config.get("backend")
    return str(wanted or "AUTO").upper()


def _split(degrees: Any, distributed_type: str) -> list[str]:
    """
    The degrees that no strategy has together: copies of what is split and not sharded, and sequences that are split by `sp_size`
    without DeepSpeed, or by `cp_size` with it.
    """
    if not isinstance(degrees, Mapping):
        return []
    used = {
        name: value
        for name, value in degrees.items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 1
    }
    axes = {name.removeprefix("parallelism_config_").removesuffix("_size") for name in used}
    if "dp_replicate" in axes and axes & {"tp", "cp"} and "dp_shard" not in axes:
        return [f"{name}: {value}" for name, value in used.items()]
    refused = "cp_size" if distributed_type == "DEEPSPEED" else "sp_size"
    return [f"{name}: {value}" for name, value in used.items() if name.endswith(refused)]
