"""What a configuration file can ask for that is not offered here yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_nb.config import tpus
from accelerate_nb.config.nearest import meant
from accelerate_nb.errors import ConfigurationError, NotYetError

# Accelerate's words for the ways to train that are offered here.
_OFFERED = frozenset({"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MPS", *tpus.WORDS})
# Those for the ways that would silently be left out, with what people call them.
_LATER = {
    "DEEPSPEED": "DeepSpeed",
    "FSDP": "FSDP",
    "MEGATRON_LM": "Megatron-LM",
    "MULTI_HPU": "Gaudi accelerators",
    "MULTI_MLU": "MLUs",
    "MULTI_MUSA": "MUSA's GPUs",
    "MULTI_NEURON": "Neuron accelerators",
    "MULTI_NPU": "NPUs",
    "MULTI_SDAA": "SDAA's accelerators",
    "TP": "tensor parallelism",
}


def asked(content: Mapping[str, Any]) -> str | None:
    """
    What of this file's content is not offered yet, in a person's words; `None` where there is nothing.

    >>> asked({"distributed_type": "FSDP", "num_processes": 8})
    'FSDP (distributed_type: FSDP)'
    """
    if (place := content.get("compute_environment") or "LOCAL_MACHINE") != "LOCAL_MACHINE":
        return f"another place than this machine (compute_environment: {place})"
    kind = _kind(content)
    if kind in _LATER:
        return f"{_LATER[kind]} (distributed_type: {kind})"
    if split := _split(content.get("parallelism_config")):
        return f"a model that is split or sharded ({', '.join(split)})"
    return None


def refuse(content: Mapping[str, Any], where: str = "The configuration file") -> None:
    """
    Raise `NotYetError` for what is not offered yet, and `ConfigurationError` for a way to train that nobody knows.

    A launch does this; a file that asks for it is read and kept all the same.
    """
    kind = _kind(content)
    if (what := asked(content)) is not None:
        raise NotYetError(
            f"{where} asks for {what}, which is not offered here yet. Pass config_file='' to launch without the file."
        )
    known = {*_OFFERED, *_LATER}
    if kind not in known:
        hint = meant(kind, known, f"Write one of {', '.join(sorted(_OFFERED))}.")
        raise ConfigurationError(f"{where} says distributed_type: {kind}, which is no way to train. {hint}")


def _kind(content: Mapping[str, Any]) -> str:
    # YAML reads a bare `NO` as False
    return str(content.get("distributed_type") or "NO").upper()


def _split(degrees: Any) -> list[str]:
    """The degrees of a `parallelism_config` by which more is done than copies of a model trained side by side."""
    if not isinstance(degrees, Mapping):
        return []
    replicas = "dp_replicate_size"
    return [
        f"{name}: {value}"
        for name, value in degrees.items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 1
        if name.endswith("_size") and not name.endswith(replicas)
    ]
