"""The environment variables that configure the `Accelerator`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accelerate_nb.config.environment import autolog
from accelerate_nb.config.value_types import YES
from accelerate_nb.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class LauncherSettings:
    """The variables that a launcher sets for the `Accelerator`, read once; `None` where nothing is set."""

    cpu: bool
    mixed_precision: str | None
    accumulation_steps: int | None
    debug: bool
    fp8_package: str
    loader_progress: bool
    use_deepspeed: bool
    autolog: bool
    use_fsdp: bool
    use_megatron_lm: bool
    use_parallelism: bool

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> LauncherSettings:
        """The values of these variables."""
        return cls(
            cpu=is_yes(environment, "ACCELERATE_USE_CPU"),
            mixed_precision=environment.get("ACCELERATE_MIXED_PRECISION") or None,
            accumulation_steps=_steps(environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")),
            debug=is_yes(environment, "ACCELERATE_DEBUG_MODE"),
            fp8_package=environment.get("ACCELERATE_FP8_BACKEND") or "NO",
            loader_progress=is_yes(environment, "ACCELERATE_NB_LOADER_PROGRESS"),
            use_deepspeed=is_yes(environment, "ACCELERATE_USE_DEEPSPEED"),
            autolog=autolog(environment),
            use_fsdp=is_yes(environment, "ACCELERATE_USE_FSDP"),
            use_megatron_lm=is_yes(environment, "ACCELERATE_USE_MEGATRON_LM"),
            use_parallelism=is_yes(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"),
        )


def is_yes(environment: Mapping[str, str], name: str, default: str = "") -> bool:
    """Whether a variable is true; `default` for one that is not set."""
    return environment.get(name, default).lower() in YES


def _steps(text: str | None) -> int | None:
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS should be a whole number, but is {text!r}. Correct or unset it."
        ) from None
