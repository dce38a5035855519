"""The configuration file of Accelerate: found where its own tools put it, read, written."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from accelerate_nb.config.atomic_write import write_whole
from accelerate_nb.config.environment import runs_folder
from accelerate_nb.config.formats import EXTENSION_MARK, extension_keys, is_extension_line, key, text
from accelerate_nb.config.hf_keys import (
    OF_ACCELERATE,
    OF_EARLIER,
    OF_SAGEMAKER,
    TOGETHER,
    apart,
    refuse_unsupported,
    today,
    together,
)
from accelerate_nb.config.run_config import all_settings, origin, setting_named
from accelerate_nb.config.value_types import DEEPEST_NESTING, LONGEST_TEXT, brief, did_you_mean
from accelerate_nb.errors import ConfigurationError, UnknownSettingError

# Each alias of YAML may repeat what others repeat.
_MOST_ALIASES = 10
# So many unknown keys are named.
_MOST_NAMED = 20
_PRECISIONS = ("no", "fp16", "bf16", "fp8")


def find(environment: Mapping[str, str], given: str | Path | None = None) -> Path | None:
    """The configuration file: the `given` one, that of `ACCELERATE_NB_CONFIG_FILE`, or Accelerate's default one, if any."""
    # One that is given as empty text means that no file is read. Path.is_file would raise an error for a folder that can't
    # be searched, such as another user's cache.
    if given is None:
        given = environment.get("ACCELERATE_NB_CONFIG_FILE")
    if given is None:
        default = default_path(environment)
        return default if os.path.isfile(default) else None
    if not str(given):
        return None
    path = Path(given).expanduser()
    if not os.path.isfile(path):
        found = "is a folder" if os.path.isdir(path) else "does not exist, or its folder can't be searched"
        raise ConfigurationError(f"The configuration file {path} was requested, and {found}. Correct its path.")
    return path


def default_path(environment: Mapping[str, str]) -> Path:
    """The path at which Accelerate's own tools put the configuration file; early ones wrote `default_config.json`."""
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "~", ".cache")
    # nobody may have a home, as in a container, where Path.expanduser raises an error
    folder = Path(os.path.expanduser(environment.get("HF_HOME") or Path(cache, "huggingface")), "accelerate")
    usual, early = folder / "default_config.yaml", folder / "default_config.json"
    return early if os.path.isfile(early) and not os.path.isfile(usual) else usual


def read(path: Path) -> dict[str, Any]:
    """The content of the file, for `resolve`: today's key for each setting, without empty ones."""
    # Files of all of Accelerate's releases since 0.11 are read, YAML and JSON. A requested feature that is not offered
    # yet is in the content too, and `resolve` raises for it.
    content = apart(today(_content(path)))
    if content.get("num_processes") == -1:
        del content["num_processes"]  # Accelerate writes it where it leaves the number to others
    return _normalised(content)


def whole(path: Path) -> dict[str, Any]:
    """The whole content of the file, with its nested parts, as today's Accelerate spells it."""
    return _normalised(today(_content(path)))


def configured_runs_folder(environment: Mapping[str, str], requested: str | os.PathLike[str] | None = None) -> Path:
    """The requested folder, else that in which a launch with this environment and its configuration file keeps its runs."""
    if requested is not None:
        return runs_folder(environment, os.fspath(requested))
    path = find(environment)
    content = None if path is None else read(path)
    return runs_folder(environment, origin(setting_named("folder"), {}, environment, content).value)


@dataclass(frozen=True, slots=True)
class ConfigDraft:
    """The content of a configuration file, not yet written."""

    # Of a file that it `replaces`, `kept` are the keys that are no settings of this package, `changed` those that get
    # another value or go, and `comments` is whether it has comments, which are dropped.

    path: Path
    content: dict[str, Any]
    replaces: bool = False
    kept: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    comments: bool = False

    def write(self) -> None:
        """Write the file, whole or not at all; `ConfigurationError` gives the reason for a failure."""
        # a link stays a link: people keep their configuration files elsewhere
        path = self.path.resolve()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, self.text)
        except OSError as error:
            raise ConfigurationError(
                f"The configuration was to be written to {self.path}, and can't be: {error.strerror}. Save it to another path."
            ) from None

    @property
    def text(self) -> str:
        """The text to be written."""
        if self.path.suffix == ".json":
            return json.dumps(self.content, indent=2, ensure_ascii=False) + "\n"
        return text(self.content)


def draft(path: str | Path, content: Mapping[str, Any]) -> ConfigDraft:
    """A file with `content`, and with the other keys of the existing file."""
    # neither a file that can't be read nor one that requests what is not offered here is overwritten
    target = Path(path).expanduser()
    if os.path.isdir(target):
        raise ConfigurationError(
            f"The configuration was to be written to {target}, which is a folder. Add a file's name."
        )
    _refuse_extensions_in_json(target, content)
    if not os.path.exists(target):
        return ConfigDraft(target, dict(content))
    current = _content(target)
    refuse_unsupported(current, f"The configuration file {target}")
    mine = {"compute_environment", "distributed_type", *(key for setting in all_settings() for key in setting.keys)}
    others = {name: value for name, value in today(current).items() if name not in {*mine, *TOGETHER, *content}}
    whole = {**content, **others}
    return ConfigDraft(
        target,
        whole,
        replaces=True,
        kept=tuple(others),
        changed=_changed(current, whole),
        comments=_has_comments(target),
    )


def renewed(path: Path, distributed_type: str) -> ConfigDraft:
    """The same file as today's Accelerate would write it: every key that means something now stays."""
    # `distributed_type` is for a file without it, which Accelerate's own tools refuse
    current = _content(path)
    spelled = {item: key(setting) for setting in all_settings() for item in setting.keys if item not in OF_ACCELERATE}
    content: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": distributed_type}
    content |= {spelled.get(name, name): value for name, value in _normalised(apart(today(current))).items()}
    content = together(content)
    _refuse_extensions_in_json(path, content)
    return ConfigDraft(path, content, replaces=True, changed=_changed(current, content), comments=_has_comments(path))


def write_basic(
    mixed_precision: str, file: str | os.PathLike[str] | None, *, distributed_type: str, num_processes: int, cpu: bool
) -> Path | None:
    """Write a configuration for one machine, as Accelerate does; `None` where there is a file already, which stays."""
    path = default_path(os.environ) if file is None else Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return None
    content = basic(mixed_precision, distributed_type=distributed_type, num_processes=num_processes, cpu=cpu)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def basic(mixed_precision: str, *, distributed_type: str, num_processes: int, cpu: bool) -> dict[str, Any]:
    """The content that Accelerate's tools write for a machine as it is."""
    if mixed_precision.lower() not in _PRECISIONS:
        raise ConfigurationError(
            f"mixed_precision={mixed_precision!r} was to be written. It should be one of {', '.join(_PRECISIONS)}."
        )
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": distributed_type,
        "downcast_bf16": False,
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed_precision.lower(),
        "num_machines": 1,
        "num_processes": num_processes,
        "rdzv_backend": "static",
        "same_network": False,
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
        "use_cpu": cpu,
    }


def _changed(current: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of a file that get another value or go."""
    after = apart(new)
    return tuple(name for name, value in _normalised(apart(current)).items() if after.get(name) != value)


def _refuse_extensions_in_json(path: Path, content: Mapping[str, Any]) -> None:
    if path.suffix == ".json" and (extensions := extension_keys(content)):
        raise ConfigurationError(
            f"The configuration was to be written to {path}, but a JSON file can't hold {', '.join(extensions)}: Accelerate's own "
            "tools refuse a file with keys that they do not know, and JSON has no comments to put them in. Name a .yaml file."
        )


def _has_comments(path: Path) -> bool:
    lines = path.read_text(encoding="utf-8").splitlines()
    return any(line.lstrip().startswith("#") and not is_extension_line(line) for line in lines)


def _content(path: Path) -> dict[str, Any]:
    """All that a file holds, under the keys that stand there; what is written for this package alone wins."""
    try:
        with path.open("rb") as file:
            found = file.read(LONGEST_TEXT + 1)
        if len(found) > LONGEST_TEXT:
            raise _broken(path, "", f"it has more than {LONGEST_TEXT:,} bytes")
        written = found.decode("utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"The configuration file {path} can't be read: {error.strerror}. Name another one with config_file=..."
        ) from None
    except UnicodeDecodeError as error:
        raise _broken(path, "", error) from None
    # at their positions, which errors name
    extensions = (
        line.partition(EXTENSION_MARK)[2] if line.startswith(EXTENSION_MARK) else "" for line in written.splitlines()
    )
    content = {**_keys(path, written), **_keys(path, "\n".join(extensions), beyond=len(EXTENSION_MARK))}
    return {str(name): value for name, value in content.items()}


def _keys(path: Path, written: str, beyond: int = 0) -> dict[Any, Any]:
    """The keys and values of a text of YAML, or of JSON, which is YAML too; each key is known, or it is an error."""
    import yaml

    try:
        _refuse_excess(written)
        loader = yaml.SafeLoader(written)
        root = loader.get_single_node()
        content = loader.construct_document(root) if root is not None else None
        # neither an integer that Python can't write, nor a value within itself
        json.dumps(content, default=str, skipkeys=True)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _broken(path, position, error.problem or error) from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, IndexError) as error:
        # what Python has against such a number is about its own limits
        raise _broken(path, "", "it has a number that is too large" if "digits" in str(error) else error) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"The configuration file {path} should hold keys with values, but holds {type(content).__name__}. "
            "Write it with `accelerate-nb config`, or remove it."
        )
    _refuse_unknown(path, root, beyond)
    return content


def _refuse_excess(written: str) -> None:
    """Raise an error of YAML for a text that would keep the parser, or whoever reads its values, busy for long."""
    import yaml

    depth = aliases = 0
    for event in yaml.parse(written, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > DEEPEST_NESTING or aliases > _MOST_ALIASES:
            most = (
                f"{DEEPEST_NESTING} levels within each other" if depth > DEEPEST_NESTING else f"{_MOST_ALIASES} aliases"
            )
            # a parser in Python has marks in Python
            mark = cast("yaml.Mark | None", event.start_mark)
            raise yaml.MarkedYAMLError(problem=f"it has more than {most}", problem_mark=mark)


def _broken(path: Path, position: str, why: Any) -> ConfigurationError:
    return ConfigurationError(
        f"The configuration file {path}{position} can't be read: {str(why)[:500]}. Correct it, or remove the file."
    )


def _refuse_unknown(path: Path, root: Any, beyond: int) -> None:
    """Raise `UnknownSettingError` for keys that mean nothing."""
    settings = {key for setting in all_settings() for key in setting.keys}
    known = settings | OF_ACCELERATE | OF_SAGEMAKER | OF_EARLIER
    unknown = [node for node, _ in root.value if str(node.value) not in known]
    wrong = []
    for node in unknown[:_MOST_NAMED]:
        near = did_you_mean(str(node.value), known)
        suggestion = f" (d{near[1:]})" if near else ""
        where = f"in line {node.start_mark.line + 1}, column {node.start_mark.column + beyond + 1}"
        wrong.append(f"the unknown key {brief(node.value)} {where}{suggestion}")
    if wrong:
        more = f"; and {len(unknown) - len(wrong)} more" if len(unknown) > len(wrong) else ""
        raise UnknownSettingError(
            f"The configuration file {path} has {'; '.join(wrong)}{more}. Correct {'it' if len(wrong) == 1 else 'them'}, or remove "
            f"{'the line' if len(wrong) == 1 else 'the lines'}; `accelerate-nb config` writes a new file."
        )


def _normalised(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content without empty keys, and with the words that YAML 1.1 reads as False: a bare `no`."""
    bare = {"mixed_precision": "no", "dynamo_backend": "no", "distributed_type": "NO"}
    return {
        name: bare[name] if value is False and name in bare else value
        for name, value in content.items()
        if value not in (None, {})
    }
