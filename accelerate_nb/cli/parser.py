"""Parser of command lines: the settings as flags, and the nearest flag in the error for a mistake."""

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from accelerate_nb.config.formats import SHORT
from accelerate_nb.config.settings import GROUPS, Setting, warn_deprecated
from accelerate_nb.config.value_types import Boolean, did_you_mean
from accelerate_nb.errors import ConfigurationError

# The prefix of a setting's name among the parsed arguments.
_PREFIX = "setting:"
_NO = "no-"


class CliParser(argparse.ArgumentParser):
    """A parser whose mistakes are a `ConfigurationError`, and name the nearest flag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # an abbreviated flag means another one as soon as a new flag begins with the same letters
        usual: dict[str, Any] = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(*args, **{**usual, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Raise instead of ending the process."""
        suggestion = ""
        if unknown := re.search(r"unrecognized arguments: ([^\s=]+)|invalid choice: '([^'=]*)", message):
            known = (
                word for action in self._actions for word in (*action.option_strings, *map(str, action.choices or ()))
            )
            suggestion = did_you_mean(unknown[1] or unknown[2] or "", known)
        help_is = f"`{self.prog} --help` lists its arguments."
        raise ConfigurationError(" ".join(filter(None, (f"{message}.", suggestion, help_is))))


class _SettingText(argparse.Action):
    """The text of a setting, with its flag as it was typed; a former spelling of the flag `const` warns."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self.const is not None:
            warn_deprecated(str(option_string), str(self.const))
        setattr(namespace, self.dest, (option_string, values))


def add_settings(parser: argparse.ArgumentParser, settings: Iterable[Setting]) -> None:
    """Make each setting a flag, under the heading of its group: `--num-processes`, or `--num_processes` as in Accelerate."""
    # A setting's other names in a configuration file (`--main_process_port`) are flags too, which the help leaves out.
    # Nothing has a default here: `given_settings` reads what the user gave.
    headings: dict[str, argparse._ArgumentGroup] = {}
    for setting in settings:
        if setting.group not in headings:
            headings[setting.group] = parser.add_argument_group(GROUPS[setting.group])
        _add(headings[setting.group], setting)


def add_config_file(parser: argparse._ActionsContainer, help: str) -> None:
    """Make a flag that names a configuration file."""
    parser.add_argument(*spellings("config_file"), metavar="FILE", help=help)


def given_settings(arguments: argparse.Namespace, settings: Iterable[Setting]) -> dict[str, Any]:
    """The values of these settings on a command line, checked; `ConfigurationError` names an invalid value."""
    given = vars(arguments)
    typed = [(setting, *given[_PREFIX + setting.name]) for setting in settings if _PREFIX + setting.name in given]
    return {setting.name: setting.parse(text, f"{flag} was given") for setting, flag, text in typed}


def _add(parser: argparse._ArgumentGroup, setting: Setting) -> None:
    shown = [*(short for short, name in SHORT.items() if name == setting.name), setting.flag]
    former = [spelled for name in setting.deprecated for spelled in spellings(name)]
    others = [spelled for name in setting.keys for spelled in spellings(name) if spelled not in (*shown, *former)]
    common: dict[str, Any] = {"dest": _PREFIX + setting.name, "default": argparse.SUPPRESS}
    has_default = setting.default not in (None, "", False) and not isinstance(setting.default, dict)
    text = (setting.help + (f" (default: {setting.default})" if has_default else "")).replace("%", "%%")
    if isinstance(setting.value_type, Boolean):
        common["action"] = "store_const"
        parser.add_argument(*shown, **common, const=(setting.flag, "yes"), help=text)
        if others:
            parser.add_argument(*others, **common, const=(setting.flag, "yes"), help=argparse.SUPPRESS)
        negated = ["--" + separator.join(["no", name[2:]]) for name in (setting.flag, *others) for separator in "-_"]
        parser.add_argument(*negated, **common, const=(setting.flag, "no"), help=argparse.SUPPRESS)
        return
    common["action"] = _SettingText
    placeholder = "{" + ",".join(setting.choices) + "}" if setting.choices else setting.value_type.PLACEHOLDER
    parser.add_argument(*shown, **common, metavar=placeholder, help=text)
    if others:
        parser.add_argument(*others, **common, metavar=placeholder, help=argparse.SUPPRESS)
    if former:
        parser.add_argument(*former, **common, const=setting.flag, help=argparse.SUPPRESS)


def spellings(name: str) -> tuple[str, ...]:
    """A flag with hyphens, and with underscores."""
    return tuple(dict.fromkeys(["--" + name.replace("_", "-"), "--" + name.replace("-", "_")]))
