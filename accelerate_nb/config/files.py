"""The configuration file of Accelerate: found where its own tools put it, read, written."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_nb.config.run import all_settings
from accelerate_nb.config.spelling import TOGETHER, apart, text
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
    content = apart(_content(path))
    return {str(key): _meant(key, value) for key, value in content.items() if _says_something(key, value)}


@dataclass(frozen=True, slots=True)
class Draft:
    """
    What a configuration file would hold, not yet written.

    `replaces` tells that there is a file already. Of it `kept` are the keys that are no settings of this package and stay
    as they are, `changed` those that get another value or go, and `comments` says that it has comments, which go.
    """

    path: Path
    content: dict[str, Any]
    replaces: bool = False
    kept: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    comments: bool = False

    def write(self) -> None:
        """Write the file, whole or not at all; `ConfigurationError` says why it could not be."""
        # a link stays a link: people keep their configuration files elsewhere
        place = self.path.resolve()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(place, self._text())
        except OSError as error:
            raise ConfigurationError(
                f"The configuration was to be written to {self.path}, but {error.strerror}. Save it to another path."
            ) from None

    def _text(self) -> str:
        if self.path.suffix == ".json":
            return json.dumps(self.content, indent=2, ensure_ascii=False) + "\n"
        return text(self.content)


def draft(path: str | Path, content: Mapping[str, Any]) -> Draft:
    """
    A file that says `content`, and whatever the present one says of other things.

    Raises `ConfigurationError` where the present file can't be read, with line and column, and `NotYetError` where it asks
    for what is not offered here: neither is written over.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        raise ConfigurationError(
            f"The configuration was to be written to {place}, which is a folder. Add a file's name."
        )
    if not place.exists():
        return Draft(place, dict(content))
    present = _content(place)
    settled = {
        "compute_environment",
        "distributed_type",
        *TOGETHER,
        *(key for one in all_settings() for key in one.keys),
    }
    others = {name: value for name, value in present.items() if name not in settled}
    whole = {**content, **others}
    return Draft(
        place,
        whole,
        replaces=True,
        kept=tuple(others),
        changed=tuple(name for name in present if name in settled and whole.get(name) != _meant(name, present[name])),
        comments=any(line.lstrip().startswith("#") for line in place.read_text(encoding="utf-8").splitlines()),
    )


def _write_whole(place: Path, written: str) -> None:
    """Put a text in the place of a file at once, with the rights that the file had."""
    beside = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(beside, "x", encoding="utf-8") as file:
            file.write(written)
            file.flush()
            os.fsync(file.fileno())
        if place.exists():
            beside.chmod(place.stat().st_mode & 0o777)
        beside.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


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


def _content(path: Path) -> dict[Any, Any]:
    """All that a file holds, as it stands there."""
    content = _parsed(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"The configuration file {path} should hold keys with values, but holds {type(content).__name__}. "
            "Write it with `accelerate config`, or remove it."
        )
    _refuse_what_is_later(content, path)
    return content


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
    except OSError as error:
        raise ConfigurationError(
            f"The configuration file {path} can't be read: {error.strerror}. Name another one with config_file=..."
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
    return "no" if key in {"mixed_precision", "dynamo_backend"} and value is False else value
