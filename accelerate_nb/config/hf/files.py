"""The configuration file of Accelerate: found where its own tools put it, read, written."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_nb.config import later
from accelerate_nb.config.keys import OF_ACCELERATE, OF_EARLIER, OF_SAGEMAKER, TOGETHER, apart, today, together
from accelerate_nb.config.run import all_settings
from accelerate_nb.config.spelling import OWN_MARK, is_own, key, own_keys, text
from accelerate_nb.config.writing import write_whole
from accelerate_nb.errors import ConfigurationError


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
    """Where Accelerate's own tools put the configuration file; early ones wrote `default_config.json`."""
    folder = _hugging_face_home(environment) / "accelerate"
    usual, early = folder / "default_config.yaml", folder / "default_config.json"
    return early if early.is_file() and not usual.is_file() else usual


def read(path: Path) -> dict[str, Any]:
    """
    What the file says, for `resolve`: a key for each thing, as today's Accelerate spells it, without those that say nothing.

    Files of all of Accelerate's releases since 0.11 are read, YAML and JSON; what is asked for and not offered yet is in
    the content too, and is told by `resolve`. `ConfigurationError` gives line and column of what is broken or unknown.
    """
    content = apart(today(_content(path)))
    return {name: _meant(name, value) for name, value in content.items() if _says_something(name, value)}


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
            write_whole(place, self.text)
        except OSError as error:
            raise ConfigurationError(
                f"The configuration was to be written to {self.path}, and can't be: {error.strerror}. Save it to another path."
            ) from None

    @property
    def text(self) -> str:
        """What would be written."""
        if self.path.suffix == ".json":
            return json.dumps(self.content, indent=2, ensure_ascii=False) + "\n"
        return text(self.content)


def draft(path: str | Path, content: Mapping[str, Any]) -> Draft:
    """
    A file that says `content`, and whatever the present one says of other things.

    Raises `ConfigurationError` where the present file can't be read, with line and column, and `NotYetError` where it asks
    for what is not offered here: neither is written over. Settings that only this package knows can't stand in a JSON file.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        raise ConfigurationError(
            f"The configuration was to be written to {place}, which is a folder. Add a file's name."
        )
    _refuse_own_in_json(place, content)
    if not place.exists():
        return Draft(place, dict(content))
    present = _content(place)
    later.refuse(present, f"The configuration file {place}")
    mine = {"compute_environment", "distributed_type", *(key for one in all_settings() for key in one.keys)}
    others = {name: value for name, value in today(present).items() if name not in {*mine, *TOGETHER, *content}}
    whole = {**content, **others}
    return Draft(
        place,
        whole,
        replaces=True,
        kept=tuple(others),
        changed=_changed(present, whole),
        comments=_has_comments(place),
    )


def renewed(path: Path, distributed_type: str) -> Draft:
    """
    The same file as today's Accelerate would write it: every key that means something now stays, whatever it asks for.

    `distributed_type` is for a file that does not say it, which Accelerate's own tools refuse. Raises `ConfigurationError`
    where the file can't be read.
    """
    present = _content(path)
    spelled = {each: key(one) for one in all_settings() for each in one.keys if each not in OF_ACCELERATE}
    content: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": distributed_type}
    for name, value in apart(today(present)).items():
        if value not in (None, {}):
            content[spelled.get(name, name)] = _meant(name, value)
    content = together(content)
    _refuse_own_in_json(path, content)
    return Draft(path, content, replaces=True, changed=_changed(present, content), comments=_has_comments(path))


def _changed(present: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of a file that get another value or go."""
    before, after = apart(present), apart(new)
    return tuple(
        name
        for name, value in before.items()
        if after.get(name) != _meant(name, value) and value not in (None, {})
    )  # fmt: skip


def _refuse_own_in_json(place: Path, content: Mapping[str, Any]) -> None:
    if place.suffix == ".json" and (own := own_keys(content)):
        raise ConfigurationError(
            f"The configuration was to be written to {place}, but a JSON file can't say {', '.join(own)}: Accelerate's own "
            "tools refuse a file with keys that they do not know, and JSON has no comments to put them in. Name a .yaml file."
        )


def _has_comments(place: Path) -> bool:
    lines = place.read_text(encoding="utf-8").splitlines()
    return any(line.lstrip().startswith("#") and not is_own(line) for line in lines)


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


def _content(path: Path) -> dict[str, Any]:
    """All that a file holds, under the keys that stand there; what is written for this package alone wins."""
    written = _text_of(path)
    content = {**_keys(path, written), **_keys(path, _own_lines(written), beyond=len(OWN_MARK))}
    return {str(name): value for name, value in content.items()}


def _own_lines(written: str) -> str:
    """The lines for this package alone, in their places."""
    return "\n".join(line.removeprefix(OWN_MARK) if line.startswith(OWN_MARK) else "" for line in written.splitlines())


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"The configuration file {path} can't be read: {error.strerror}. Name another one with config_file=..."
        ) from None
    except UnicodeDecodeError as error:
        raise _broken(path, "", error) from None


def _keys(path: Path, written: str, beyond: int = 0) -> dict[Any, Any]:
    """The keys and values of a text of YAML, or of JSON, which is YAML too; each key is known, or it is an error."""
    import yaml

    try:
        root = yaml.compose(written, Loader=yaml.SafeLoader)
        content = yaml.safe_load(written)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _broken(path, place, error.problem or error) from None
    except yaml.YAMLError as error:
        raise _broken(path, "", error) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"The configuration file {path} should hold keys with values, but holds {type(content).__name__}. "
            "Write it with `accelerate-nb config`, or remove it."
        )
    _refuse_unknown(path, root, beyond)
    return content


def _broken(path: Path, place: str, why: Any) -> ConfigurationError:
    return ConfigurationError(
        f"The configuration file {path}{place} can't be read: {why}. Correct it, or remove the file."
    )


def _refuse_unknown(path: Path, root: Any, beyond: int) -> None:
    settings = {key for one in all_settings() for key in one.keys}
    known = settings | OF_ACCELERATE | OF_SAGEMAKER | OF_EARLIER
    wrong = [_unknown(node, known, beyond) for node, _ in root.value if str(node.value) not in known]
    if wrong:
        raise ConfigurationError(
            f"The configuration file {path} has {'; '.join(wrong)}. Correct {'it' if len(wrong) == 1 else 'them'}, or remove "
            f"{'the line' if len(wrong) == 1 else 'the lines'}; `accelerate-nb config` writes a file anew."
        )


def _unknown(node: Any, known: set[str], beyond: int) -> str:
    near = difflib.get_close_matches(str(node.value), known, n=1)
    mark = node.start_mark
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"the unknown key {node.value!r} in line {mark.line + 1}, column {mark.column + beyond + 1}{hint}"


def _says_something(key: str, value: Any) -> bool:
    # Accelerate writes -1 for a number of processes that it leaves to others
    return value not in (None, {}) and not (key == "num_processes" and value == -1)


def _meant(name: str, value: Any) -> Any:
    # YAML 1.1 reads a bare `no` as False
    bare = {"mixed_precision": "no", "dynamo_backend": "no", "distributed_type": "NO"}
    return bare[name] if value is False and name in bare else value
