"""One configuration in every spelling: as a call, a cell, a command line, a configuration file."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate_nb.config import hf_keys
from accelerate_nb.config.hf_keys import OF_ACCELERATE, together
from accelerate_nb.config.run_config import RunConfig, all_settings, differing, values
from accelerate_nb.config.settings import Setting, warn_deprecated
from accelerate_nb.config.training import STRATEGIES
from accelerate_nb.config.value_types import Boolean, did_you_mean
from accelerate_nb.errors import ConfigurationError, UnknownSettingError

# The text before the settings that only this package knows, and the mark before each of their lines.
_EXTENSION_HEAD = "# What follows is read by accelerate_nb alone.\n"
EXTENSION_MARK = "#|"
_WIDTH = 88
# Flags that have a short form too.
SHORT = {"-n": "num_processes"}


def explicit_settings(config: RunConfig, elsewhere: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The arguments that a call needs to get this configuration where the environment and a file give `elsewhere`."""
    # what differs from the defaults, or from what would win over a default
    other = elsewhere or {}
    explicit = differing(config)
    for name, value in values(config).items():
        if value is not None and name in other and other[name] != value:
            explicit[name] = value
    return {setting.name: explicit[setting.name] for setting in all_settings() if setting.name in explicit}


def inexpressible(config: RunConfig, elsewhere: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings that are left open here and that the environment or a file gives: no argument takes that back."""
    found = values(config)
    return tuple(name for name, value in elsewhere.items() if value is not None and found[name] is None)


def call(settings: Mapping[str, Any], function: str = "train") -> str:
    """The cell that launches with these settings."""
    parts = [function, *(f"{name}={literal(value)}" for name, value in settings.items())]
    line = f"notebook_launcher({', '.join(parts)})"
    if len(line) <= _WIDTH:
        return line
    return "notebook_launcher(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def magic(settings: Mapping[str, Any]) -> str:
    """The first line of a cell that runs on every rank with these settings."""
    return " ".join(["%%accelerate", *([shlex.join(flags(settings))] if settings else [])])


def command(settings: Mapping[str, Any], script: str = "train.py") -> str:
    """The command line that runs a script with these settings."""
    return shlex.join(["accelerate-nb", "launch", *flags(settings), script])


def flags(settings: Mapping[str, Any]) -> list[str]:
    """The settings as arguments of a command line: `['--num-processes', '2', '--cpu', '--no-debug']`."""
    known = {setting.name: setting for setting in all_settings()}
    words: list[str] = []
    for name, value in settings.items():
        flag, text = known[name].flag, _text(value)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag.removeprefix('--')}")
        else:
            # a value that looks like a flag is held to its name
            words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return words


def variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings as variables of the environment."""
    known = {setting.name: setting for setting in all_settings()}
    return {known[name].variables[0]: _text(value) for name, value in settings.items()}


def read_words(words: Sequence[str], flags: Sequence[Setting], where: str) -> tuple[dict[str, Any], list[str]]:
    """The values of the flags among some words, by the names of their settings, and the words that are no flags."""
    given: dict[str, Any] = {}
    others: list[str] = []
    rest = list(words)
    while rest:
        if _is_flag(rest[0]):
            given.update([_taken(rest, flags, where)])
        else:
            others.append(rest.pop(0))
    return given, others


def keys(config: RunConfig, distributed_type: str) -> dict[str, Any]:
    """The configuration as the content of a file, under Accelerate's keys where it has them."""
    # `distributed_type` is Accelerate's word for what the file leads to on this machine. Settings that have their
    # default are left out, but for those that Accelerate's own tools always write.
    found = values(config)
    changed = differing(config)
    content: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": distributed_type}
    # of a file for TPUs without it Accelerate's reading is taken, which overlooks the number of processes
    always = {"cpu", "debug", *({"engine"} if distributed_type in hf_keys.TPU_WORDS else ())}
    for setting in all_settings():
        if setting.name in changed or (setting.name in always and found[setting.name] is not None):
            content[key(setting)] = plain(found[setting.name])
    for strategy in STRATEGIES:
        if strategy.name == config.training.strategy:
            content = strategy.for_accelerate(content)
    return together(content)


def key(setting: Setting) -> str:
    """A setting's key in a configuration file: Accelerate's where it has one."""
    return next((name for name in setting.keys if name in OF_ACCELERATE), setting.name)


def extension_keys(content: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys at which Accelerate's own tools would refuse a file; they stand in comments, which only this package reads."""
    return tuple(name for name in content if name not in OF_ACCELERATE)


def text(content: Mapping[str, Any]) -> str:
    """The text of a configuration file, which Accelerate's own tools can read too: what they don't know is a comment."""
    extensions = extension_keys(content)
    theirs = _dumped({name: value for name, value in content.items() if name not in extensions})
    lines = _dumped({name: content[name] for name in extensions}).splitlines()
    return theirs + (_EXTENSION_HEAD + "".join(f"{EXTENSION_MARK} {line}\n" for line in lines) if lines else "")


def is_extension_line(line: str) -> bool:
    """Whether a line of a file is one that `text` wrote for this package alone."""
    return line.startswith(EXTENSION_MARK) or line == _EXTENSION_HEAD.rstrip()


def _dumped(content: Mapping[str, Any]) -> str:
    import yaml

    written: str = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True) if content else ""
    return written


def _text(value: Any) -> str:
    """A value as flags and variables have it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def literal(value: Any) -> str:
    """Python's spelling of a value, with the quotes that people write."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def plain(value: Any) -> Any:
    """A value as JSON and YAML can hold it."""
    return dict(value) if isinstance(value, Mapping) else value


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word.lstrip("-")[:1].isdigit() and word.strip("-") != ""


def _taken(words: list[str], flags: Sequence[Setting], where: str) -> tuple[str, Any]:
    """Take the flag off with which words begin, and its value: the setting's name and what it is."""
    word = words.pop(0)
    spelled, equals, value = word.partition("=")
    name, text = spelled.lstrip("-").replace("-", "_"), value if equals else None
    if short := next((short for short in SHORT if word.startswith(short)), None):
        name, spelled, text = SHORT[short], word, word[len(short) :].lstrip("=") or None
    elif name.startswith("no_") and any(
        name[3:] in (flag.name, *flag.deprecated) and isinstance(flag.value_type, Boolean) for flag in flags
    ):
        name, spelled, text = name[3:], word, "no"
    setting = _named(name, flags, spelled, where)
    if text is None and isinstance(setting.value_type, Boolean):
        text = words.pop(0) if words and words[0].lower() in {"true", "false", "yes", "no"} else "yes"
    elif text is None:
        if not words or _is_flag(words[0]):
            raise ConfigurationError(
                f"{where} was given {setting.flag} without a value. It should be {setting.value_type.expected}. ({setting.help})"
            )
        text = words.pop(0)
    return setting.name, setting.parse(text, f"{where} was given {setting.flag}")


def _named(name: str, flags: Sequence[Setting], spelled: str, where: str) -> Setting:
    """The setting of this name, present or former, among some flags; `UnknownSettingError` names the nearest."""
    for flag in flags:
        if name in flag.deprecated:
            warn_deprecated(spelled, flag.flag)
        if name == flag.name or name in flag.deprecated:
            return flag
    known = sorted(item.flag for item in flags)
    listed = ", ".join([*(short for short, name in SHORT.items() if any(item.name == name for item in flags)), *known])
    suggestion = did_you_mean("--" + name.replace("_", "-"), known, f"Leave it out. It knows {listed}.")
    raise UnknownSettingError(f"{where} was given {spelled}, which it does not know. {suggestion}")
