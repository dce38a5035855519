"""The options of DeepSpeed, under the keys of Accelerate's `deepspeed_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_nb.config.options.entries import Entries, Entry, Names
from accelerate_nb.config.value_types import Boolean, Integer, Number, OneOf, Text

_WORD = "DEEPSPEED"
_DEVICE = OneOf(("none", "cpu", "nvme"))
_PREFIX = "ACCELERATE_DEEPSPEED_"
_FILE = "deepspeed_config_file"
# Accelerate's launcher sets no variable of what is left out.
_KNOWN: dict[str, Entry] = {
    _FILE: Entry(Text(), f"{_PREFIX}CONFIG_FILE"),
    "zero_stage": Entry(Integer(0, 3), f"{_PREFIX}ZERO_STAGE"),
    "gradient_accumulation_steps": Entry(Integer(1), "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
    "gradient_clipping": Entry(Number(), "ACCELERATE_GRADIENT_CLIPPING"),
    "offload_optimizer_device": Entry(_DEVICE, f"{_PREFIX}OFFLOAD_OPTIMIZER_DEVICE"),
    "offload_param_device": Entry(_DEVICE, f"{_PREFIX}OFFLOAD_PARAM_DEVICE"),
    "offload_optimizer_nvme_path": Entry(Text(), f"{_PREFIX}OFFLOAD_OPTIMIZER_NVME_PATH"),
    "offload_param_nvme_path": Entry(Text(), f"{_PREFIX}OFFLOAD_PARAM_NVME_PATH"),
    "zero3_init_flag": Entry(Boolean(), f"{_PREFIX}ZERO3_INIT"),
    "zero3_save_16bit_model": Entry(Boolean(), f"{_PREFIX}ZERO3_SAVE_16BIT_MODEL"),
    "deepspeed_moe_layer_cls_names": Entry(Names(), f"{_PREFIX}MOE_LAYER_CLS_NAMES"),
}
# What places processes on machines for DeepSpeed's own launcher; here engines do.
PLACING = (
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher",
)
OPTIONS = Entries(prefix="", known=_KNOWN, ignored=frozenset(PLACING))
# What DeepSpeed's own configuration says itself.
_SAID_BY_FILE = frozenset(_KNOWN) - {_FILE, "zero3_init_flag", "deepspeed_moe_layer_cls_names"}


def variables(options: Mapping[str, Any] | None) -> dict[str, str]:
    """
    The variables through which an `Accelerator` trains with DeepSpeed, as Accelerate's launcher sets them.

    >>> variables({"zero_stage": 3})
    {'ACCELERATE_USE_DEEPSPEED': 'true', 'ACCELERATE_DEEPSPEED_ZERO_STAGE': '3'}
    """
    return {"ACCELERATE_USE_DEEPSPEED": "true", **OPTIONS.variables(options or {})}


def conflicts(options: Mapping[str, Any] | None) -> list[str]:
    """
    The options that stand beside a `deepspeed_config_file`, which says them itself.

    >>> conflicts({"deepspeed_config_file": "ds_config.json", "zero_stage": 3})
    ['zero_stage']
    """
    found = options or {}
    return sorted(_SAID_BY_FILE & set(found)) if _FILE in found else []


def with_strategy(content: Mapping[str, Any]) -> dict[str, Any]:
    """
    The content of a file for DeepSpeed, in settings.

    >>> with_strategy({"distributed_type": "DEEPSPEED"})["strategy"]
    'deepspeed'
    """
    if str(content.get("distributed_type")).upper() != _WORD:
        return dict(content)
    return {**content, "strategy": "deepspeed"}


def for_accelerate(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file whose `strategy` is DeepSpeed, as Accelerate's own tools understand it, too."""
    return {**content, "distributed_type": _WORD, "deepspeed_config": dict(content.get("deepspeed_config") or {})}
