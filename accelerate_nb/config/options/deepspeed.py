"""The options of DeepSpeed: the fields of its plugin, of which most are keys of Accelerate's `deepspeed_config`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate_nb.config.options.entries import Entries, Names, OrAuto, StrategyOptions, entries_of, option
from accelerate_nb.config.value_types import Boolean, Integer, Number, OneOf, Text

_FILE = "deepspeed_config_file"
_DEVICE = OneOf(("none", "cpu", "nvme"))


@dataclass
class DeepSpeedOptions:
    """What DeepSpeed's plugin is made with; an option that is `None` is read from its variable `ACCELERATE_*`."""

    hf_ds_config: Any = option(Text(), "none", key=_FILE, variable="ACCELERATE_DEEPSPEED_CONFIG_FILE")
    gradient_accumulation_steps: int | str | None = option(
        Integer(1), "auto", variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    )
    gradient_clipping: float | str | None = option(OrAuto(Number()), "auto", variable="ACCELERATE_GRADIENT_CLIPPING")
    zero_stage: int | None = option(Integer(0, 3), 2)
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = option(_DEVICE, "none")
    offload_param_device: str | None = option(_DEVICE, "none")
    offload_optimizer_nvme_path: str | None = option(Text(), "none")
    offload_param_nvme_path: str | None = option(Text(), "none")
    zero3_init_flag: bool | None = option(Boolean(), variable="ACCELERATE_DEEPSPEED_ZERO3_INIT")
    zero3_save_16bit_model: bool | None = option(Boolean(), False)
    transformer_moe_cls_names: str | None = option(
        Names(), key="deepspeed_moe_layer_cls_names", variable="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"
    )
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None


_KNOWN = entries_of(DeepSpeedOptions, "", "ACCELERATE_DEEPSPEED_")
# What places processes on machines for DeepSpeed's own launcher; here engines do.
PLACING = (
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher",
)
OPTIONS = Entries(prefix="", known=_KNOWN, ignored=frozenset(PLACING))
STRATEGY = StrategyOptions("deepspeed", "DEEPSPEED", "ACCELERATE_USE_DEEPSPEED", "deepspeed_config", OPTIONS)
# What DeepSpeed's own configuration says itself.
SAID_BY_FILE = frozenset(_KNOWN) - {_FILE, "zero3_init_flag", "deepspeed_moe_layer_cls_names"}


def conflicts(options: Mapping[str, Any] | None) -> list[str]:
    """The options that stand beside a `deepspeed_config_file`, which says them itself."""
    found = options or {}
    return sorted(SAID_BY_FILE & set(found)) if _FILE in found else []
