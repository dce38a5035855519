"""How a command line is read: the settings as flags, and a mistake answered with the nearest flag."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from accelerate_nb.config.fields import GROUPS, Setting
from accelerate_nb.config.kinds import YesNo
from accelerate_nb.config.nearest import meant
from accelerate_nb.config.spelling import SHORT
from accelerate_nb.errors import ConfigurationError

# Under what name a setting's text stands among the parsed arguments.
_PREFIX = "setting:"
_NO = "no-"


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are a `ConfigurationError`, and name the nearest flag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # an abbreviated flag means another one as soon as a new flag begins with the same letters
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Raise instead of ending the process."""
        unknown = re.search(r"unrecognized arguments: (\S+)|invalid choice: '([^']*)'", message)
        hint = self._nearest(next(filter(None, unknown.groups()), "")) if unknown else ""
        help_is = f"`{self.prog} --help` tells what it takes."
        raise ConfigurationError(" ".join(filter(None, (f"{message}.", hint, help_is))))

    def _nearest(self, word: str) -> str:
        flag, _, _ = word.partition("=")
        known = [text for one in self._actions for text in (*one.option_strings, *map(str, one.choices or ()))]
        return meant(flag, known)


def add_settings(parser: argparse.ArgumentParser, settings: Iterable[Setting]) -> None:
    """
    Make each setting a flag, under the heading of its group: `--num-processes`, or `--num_processes` as in Accelerate.

    A setting's other names in a configuration file (`--main_process_port`) are flags too, which the help leaves out. What
    the person said is read by `said_settings`; nothing has a default here.
    """
    headings: dict[str, argparse._ArgumentGroup] = {}
    for one in settings:
        if one.group not in headings:
            headings[one.group] = parser.add_argument_group(GROUPS[one.group])
        _add(headings[one.group], one)


def add_config_file(parser: argparse._ActionsContainer, help: str) -> None:
    """Make a flag that names a configuration file."""
    parser.add_argument(*_spellings("config_file"), metavar="FILE", help=help)


def said_settings(arguments: argparse.Namespace, settings: Iterable[Setting]) -> dict[str, Any]:
    """What a command line says of these settings, checked; `ConfigurationError` tells which value can't be one."""
    texts = {name: text for name, text in vars(arguments).items() if name.startswith(_PREFIX)}
    return {
        one.name: one.parse(texts[_PREFIX + one.name], f"{one.flag} was given")
        for one in settings
        if _PREFIX + one.name in texts
    }


def _add(parser: argparse._ArgumentGroup, one: Setting) -> None:
    shown = [*(short for short, name in SHORT.items() if name == one.name), one.flag]
    others = [spelled for name in one.keys for spelled in _spellings(name) if spelled not in shown]
    common: dict[str, Any] = {"dest": _PREFIX + one.name, "default": argparse.SUPPRESS}
    if isinstance(one.kind, YesNo):
        parser.add_argument(*shown, **common, action="store_const", const="yes", help=_help(one))
        if others:
            parser.add_argument(*others, **common, action="store_const", const="yes", help=argparse.SUPPRESS)
        negated = ["--" + separator.join(["no", name[2:]]) for name in (one.flag, *others) for separator in "-_"]
        parser.add_argument(*negated, **common, action="store_const", const="no", help=argparse.SUPPRESS)
        return
    placeholder = "{" + ",".join(one.choices) + "}" if one.choices else one.kind.PLACEHOLDER
    parser.add_argument(*shown, **common, metavar=placeholder, help=_help(one))
    if others:
        parser.add_argument(*others, **common, metavar=placeholder, help=argparse.SUPPRESS)


def _spellings(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(["--" + name.replace("_", "-"), "--" + name.replace("-", "_")]))


def _help(one: Setting) -> str:
    default = "" if one.default in (None, "", False) or isinstance(one.default, dict) else f" (default: {one.default})"
    return (one.help + default).replace("%", "%%")
