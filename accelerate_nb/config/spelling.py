"""One configuration in every spelling: as a call, a cell, a command line, a configuration file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate_nb.config.fields import Setting, unknown_setting
from accelerate_nb.config.kinds import YesNo
from accelerate_nb.config.run import RunConfig, all_settings, differing, values
from accelerate_nb.errors import ConfigurationError

# The keys of a configuration file that Accelerate's own tools know; a file with others they refuse.
KNOWN_TO_ACCELERATE = frozenset({
    "compute_environment",
    "debug",
    "distributed_type",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "mixed_precision",
    "num_machines",
    "num_processes",
    "rdzv_backend",
    "use_cpu",
})  # fmt: skip
_WIDTH = 88


def to_say(config: RunConfig, elsewhere: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """
    What a call has to say to get this configuration, where the environment and a file say `elsewhere`.

    That is what differs from the defaults, or from what would win over a default.
    """
    other = elsewhere or {}
    said = differing(config)
    for name, value in values(config).items():
        if value is not None and name in other and other[name] != value:
            said[name] = value
    return {one.name: said[one.name] for one in all_settings() if one.name in said}


def unsayable(config: RunConfig, elsewhere: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings that are left open here and that the environment or a file says: no argument takes that back."""
    found = values(config)
    return tuple(name for name, value in elsewhere.items() if value is not None and found[name] is None)


def call(said: Mapping[str, Any], function: str = "train") -> str:
    """
    The cell that launches with these settings.

    >>> call({"num_processes": 2, "mixed_precision": "bf16"})
    'notebook_launcher(train, num_processes=2, mixed_precision="bf16")'
    """
    parts = [function, *(f"{name}={_literal(value)}" for name, value in said.items())]
    line = f"notebook_launcher({', '.join(parts)})"
    if len(line) <= _WIDTH:
        return line
    return "notebook_launcher(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def magic(said: Mapping[str, Any]) -> str:
    """The first line of a cell that runs on every rank with these settings."""
    return " ".join(["%%accelerate", *([shlex.join(flags(said))] if said else [])])


def command(said: Mapping[str, Any], script: str = "train.py") -> str:
    """The command line that runs a script with these settings."""
    return shlex.join(["accelerate-nb", "launch", *flags(said), script])


def flags(said: Mapping[str, Any]) -> list[str]:
    """
    The settings as words of a command line.

    >>> flags({"num_processes": 2, "cpu": True, "debug": False})
    ['--num-processes', '2', '--cpu', '--no-debug']
    """
    known = {one.name: one for one in all_settings()}
    return [word for name, value in said.items() for word in _flag(known[name], value)]


def read_flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """
    The settings that the words of a command line begin with, and the words after them.

    Both `--name value` and `--name=value` are read; `--` ends the settings. Raises `ConfigurationError` for a flag that
    nobody knows, for a value that can't be one, and for a value that is missing.
    """
    known = {one.flag: one for one in all_settings()}
    found: dict[str, Any] = {}
    rest = list(words)
    while rest and rest[0].startswith("--"):
        flag, equals, text = rest.pop(0).partition("=")
        if flag == "--":
            break
        one = known.get(flag) or known.get(f"--{flag.removeprefix('--no-')}")
        if one is None:
            raise unknown_setting(flag.removeprefix("--").replace("-", "_"), (each.name for each in known.values()))
        if isinstance(one.kind, YesNo) and not equals:
            found[one.name] = flag == one.flag
            continue
        if not equals and not rest:
            raise ConfigurationError(
                f"{flag} was given without a value. It should be {one.kind.expected}: {flag} VALUE."
            )
        found[one.name] = one.parse(text if equals else rest.pop(0), f"{flag} was given as")
    return found, rest


def keys(config: RunConfig, distributed_type: str) -> dict[str, Any]:
    """
    The configuration as the content of a file, under Accelerate's keys where it has them.

    `distributed_type` is Accelerate's word for what the file leads to on this machine. Settings that have their default
    are left out, but for those that Accelerate's own tools always write.
    """
    found = values(config)
    said = differing(config)
    content: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": distributed_type}
    always = {"cpu", "debug"}
    for one in all_settings():
        if one.name in said or (one.name in always and found[one.name] is not None):
            content[key(one)] = _plain(found[one.name])
    return content


def key(one: Setting) -> str:
    """A setting's key in a configuration file: Accelerate's where it has one."""
    return next((name for name in one.keys if name in KNOWN_TO_ACCELERATE), one.name)


def strange_to_accelerate(content: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys at which Accelerate's own tools would refuse such a file."""
    return tuple(name for name in content if name not in KNOWN_TO_ACCELERATE)


def text(content: Mapping[str, Any]) -> str:
    """
    The text of a configuration file.

    >>> print(text({"num_processes": 2, "mixed_precision": "no"}), end="")
    num_processes: 2
    mixed_precision: 'no'
    """
    import yaml

    written: str = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)
    return written


def _flag(one: Setting, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [one.flag if value else f"--no-{one.flag.removeprefix('--')}"]
    text = json.dumps(value) if isinstance(value, Mapping) else str(value)
    # a value that looks like a flag, or is empty, is held to its name
    return [f"{one.flag}={text}"] if text.startswith("-") else [one.flag, text]


def _literal(value: Any) -> str:
    """Python's spelling of a value, with the quotes that people write."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
