"""The variables `ACCELERATE_*` that give a DeepSpeedPlugin the values that it was made without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from accelerate_nb.errors import ConfigurationError

Environment = Mapping[str, str]
PREFIX = "ACCELERATE_DEEPSPEED_"
# What a file of Accelerate's may not say beside a file of DeepSpeed's, which says it itself.
_SAID_BY_FILE = frozenset({
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "mixed_precision"),
    *("offload_optimizer_device", "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path"),
    "zero3_save_16bit_model",
})  # fmt: skip


def complete(plugin: Any, environment: Environment) -> None:
    """Give each argument of a plugin that is `None` the value of its variable; `ConfigurationError` for one that is no number."""
    for name, read in _READERS.items():
        if getattr(plugin, name) is None:
            setattr(plugin, name, read(environment))


def check_fields(environment: Environment) -> None:
    """Raise `ConfigurationError` where a launcher was given a file of DeepSpeed's, and beside it what that says itself."""
    said = sorted(_SAID_BY_FILE & set(environment.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")))
    if said:
        raise ConfigurationError(
            f"{', '.join(said)} was requested beside a deepspeed_config_file, which says it itself. Write it in that file, and "
            "leave it out here."
        )


def _text(name: str, default: str, environment: Environment) -> str:
    return environment.get(name, default)


def _accumulation(environment: Environment) -> int | str:
    steps = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    return int(steps) if steps.isdigit() else steps


def _clipping(environment: Environment) -> float | str:
    clipping = environment.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    return clipping if clipping == "auto" else _number("gradient_clipping", clipping)


def _stage(environment: Environment) -> int:
    return int(_number("zero_stage", environment.get(f"{PREFIX}ZERO_STAGE", "2")))


def _saves_16_bits(environment: Environment) -> bool:
    return environment.get(f"{PREFIX}ZERO3_SAVE_16BIT_MODEL", "false").lower() == "true"


def _is_msamp(environment: Environment) -> bool:
    return environment.get("ACCELERATE_FP8_BACKEND") == "MSAMP"


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(
            f"{name} is {text!r}, but should be a number. Correct or unset its variable."
        ) from None


_READERS: dict[str, Callable[[Environment], Any]] = {
    "gradient_accumulation_steps": _accumulation,
    "gradient_clipping": _clipping,
    "zero_stage": _stage,
    **{
        name: partial(_text, PREFIX + name.upper(), "none")
        for name in (
            *("offload_optimizer_device", "offload_param_device"),
            *("offload_optimizer_nvme_path", "offload_param_nvme_path"),
        )
    },
    "zero3_save_16bit_model": _saves_16_bits,
    "enable_msamp": _is_msamp,
    "msamp_opt_level": partial(_text, "ACCELERATE_FP8_OPT_LEVEL", "O1"),
    "hf_ds_config": partial(_text, f"{PREFIX}CONFIG_FILE", "none"),
}
