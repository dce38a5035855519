"""Settings for TPUs beyond those of every run: the function that runs on their cores, and the address of a pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from accelerate_nb.config.value_types import Boolean, InvalidValue, Text, ValueType
from accelerate_nb.errors import ConfigurationError

# Accelerate's words for a launch on TPUs: today's, and the one of releases before 0.28.
WORDS = frozenset({"XLA", "TPU"})
# The function that Accelerate's files name by default; here the program itself runs then.
_USUAL_FUNCTION = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class TpusConfig:
    """
    The settings of a launch on TPUs.

    `function` is the function that each core calls in an imported program; without it the program itself runs. `downcasts`
    lets bf16 mean that float64 becomes float32, not bfloat16 like the rest. A pod, machines of TPUs that train together, has
    a `name` and a `zone`; a launch on it runs on each of its machines, with `sudo` and with variables of the `environment`,
    if set.
    """

    function: str | None = None
    downcasts: bool = False
    is_pod: bool = False
    name: str | None = None
    zone: str | None = None
    sudo: bool = False
    environment: tuple[str, ...] = ()

    def keys(self) -> dict[str, Any]:
        """This under the keys of Accelerate's configuration files, as its own tools write it."""
        content = {_KEYS[field.name][0]: getattr(self, field.name) for field in fields(self)}
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in content.items()}
        found = {key: value for key, value in plain.items() if value not in (None, [])}
        return {_KEYS["function"][0]: _USUAL_FUNCTION, **found}

    def variables(self, mixed_precision: str | None) -> dict[str, str]:
        """The environment variables that workers get because of it."""
        if not (self.downcasts and mixed_precision == "bf16"):
            return {}
        # torch_xla reads the second; Accelerate's own state, which a script may import, sets that by the first
        return {"ACCELERATE_DOWNCAST_BF16": "1", "XLA_DOWNCAST_BF16": "1"}


# The key of each field in a configuration file, and what it can hold.
_KEYS: dict[str, tuple[str, ValueType]] = {
    "function": ("main_training_function", Text()),
    "downcasts": ("downcast_bf16", Boolean()),
    "is_pod": ("tpu_use_cluster", Boolean()),
    "name": ("tpu_name", Text()),
    "zone": ("tpu_zone", Text()),
    "sudo": ("tpu_use_sudo", Boolean()),
    "environment": ("tpu_env", Text()),
}


def file_is_for_tpus(content: Mapping[str, Any]) -> bool:
    """
    Whether a configuration file is for TPUs.

    >>> file_is_for_tpus({"distributed_type": "XLA"})
    True
    """
    return str(content.get("distributed_type")).upper() in WORDS


def of(content: Mapping[str, Any]) -> TpusConfig:
    """The TPU settings of a configuration file; `ConfigurationError` names an invalid value."""
    found = {name: content.get(key) for name, (key, _) in _KEYS.items()}
    if found["function"] == _USUAL_FUNCTION:
        del found["function"]
    return TpusConfig(**{name: _read(name, value) for name, value in found.items() if value not in (None, "")})


def with_engine(content: Mapping[str, Any]) -> dict[str, Any]:
    """
    The content of a file for TPUs, in settings: through torch_xla, on all cores.

    Accelerate starts a process for every core whatever `num_processes` is there; a file with this package's own
    `engine` means it.

    >>> with_engine({"distributed_type": "XLA", "num_processes": 1})
    {'distributed_type': 'XLA', 'engine': 'xla'}
    """
    if "engine" in content or not file_is_for_tpus(content):
        return dict(content)
    return {**{name: value for name, value in content.items() if name != "num_processes"}, "engine": "xla"}


def _read(name: str, value: Any) -> Any:
    if name == "environment":
        # its own questionnaire writes [''] for an empty reply
        return tuple(str(item) for item in (value if isinstance(value, list) else [value]) if str(item))
    key, value_type = _KEYS[name]
    try:
        return value_type.parse(value) if isinstance(value, str) else value_type.check(value)
    except InvalidValue:
        raise ConfigurationError(
            f"{key} in the configuration file is {value!r}, but should be {value_type.expected}. Correct it, or remove the line."
        ) from None
