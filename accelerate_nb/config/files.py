"""What a configuration file of Accelerate says, found where its own tools put it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_nb.errors import ConfigurationError, NotYetError

# Ways to train that the file can ask for and that would silently be left out.
_LATER = {
    "FSDP": "FSDP",
    "DEEPSPEED": "DeepSpeed",
    "MEGATRON_LM": "Megatron-LM",
    "TPU": "a TPU",
    "XLA": "XLA",
}


def find(environment: Mapping[str, str], said: str | Path | None = None) -> Path | None:
    """
    The configuration file: the one that was said, the variable `ACCELERATE_NB_CONFIG_FILE`'s, or Accelerate's default one.

    `None` where there is none. A file that was said and is not there is a `ConfigurationError`; one that is said to be
    empty text means that no file is read.
    """
    if said is None:
        said = environment.get("ACCELERATE_NB_CONFIG_FILE")
    if said is not None:
        return _there(said) if str(said) else None
    default = default_place(environment)
    return default if default.is_file() else None


def default_place(environment: Mapping[str, str]) -> Path:
    """Where Accelerate's own tools put the configuration file."""
    return _hugging_face_home(environment) / "accelerate" / "default_config.yaml"


def read(path: Path) -> dict[str, Any]:
    """
    What the file says, for `resolve`: its keys as they are written, without those that say nothing.

    YAML, and JSON, which is YAML too. `ConfigurationError` gives line and column of what is broken; `NotYetError` says
    what is asked for and not offered yet.
    """
    content = _parsed(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"The configuration file {path} should hold keys with values, but holds {type(content).__name__}. "
            "Write it with `accelerate config`, or remove it."
        )
    _refuse_what_is_later(content, path)
    return {str(key): _meant(key, value) for key, value in content.items() if _says_something(key, value)}


def _there(said: str | Path) -> Path:
    path = Path(said).expanduser()
    if not path.is_file():
        raise ConfigurationError(f"The configuration file {path} was asked for, and is not there. Correct its path.")
    return path


def _hugging_face_home(environment: Mapping[str, str]) -> Path:
    if home := environment.get("HF_HOME"):
        return Path(home).expanduser()
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "~", ".cache")
    return Path(cache).expanduser() / "huggingface"


def _parsed(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigurationError(
            f"The configuration file {path}{place} can't be read: {error.problem or error}. Correct it, or remove the file."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"The configuration file {path} can't be read: {error}. Correct it, or remove the file."
        ) from None


def _refuse_what_is_later(content: Mapping[Any, Any], path: Path) -> None:
    asked = _LATER.get(str(content.get("distributed_type", "NO")).upper())
    if asked is None and content.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        asked = str(content["compute_environment"])
    if asked is not None:
        raise NotYetError(
            f"The configuration file {path} asks for {asked}, which is not offered here yet. "
            "Pass config_file='' to launch without the file."
        )


def _says_something(key: Any, value: Any) -> bool:
    # Accelerate writes -1 for a number of processes that it leaves to others
    return value is not None and not (key == "num_processes" and value == -1)


def _meant(key: Any, value: Any) -> Any:
    # YAML 1.1 reads a bare `no` as False
    return "no" if key == "mixed_precision" and value is False else value
