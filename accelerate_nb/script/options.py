"""The options of an exported script: the names that its `parameters` cell gave a value."""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

# Processes that import the script for its data loaders were started with other arguments than the script was.
_WORDS = "ACCELERATE_NB_SCRIPT_WORDS"
_OPTIONAL = " | None"
_MANY = re.compile(r"(?P<kind>list|tuple)\[(?P<of>.+?)(?:, \.\.\.)?\]")
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parameters(name: str, file: str, title: str, /, **options: tuple[str, str, str]) -> OptionValues:
    """
    Read the command line: `--learning-rate 0.1` gives `learning_rate` another value.

    `name` is the script's `__name__`; each option is its type, as an annotation spells it (`float`, `list[int]`,
    `str | None`), its default and its help, as the help shows them. What can't be understood ends the script with exit
    code 2, and `--help` with 0. In a module that is imported, nothing is read.

    >>> options = parameters(__name__, __file__, "Train a model", epochs=("int", "3", "how often"))
    >>> (epochs,) = options.instead_of(3)
    """
    return read(_words(name), os.path.basename(file), title, options)


def read(words: Sequence[str], name: str, title: str, options: Mapping[str, tuple[str, str, str]]) -> OptionValues:
    """
    The values of options in `words`; a help names the program by `name`.

    >>> read(["--epochs", "5"], "train.py", "Train a model", {"epochs": ("int", "3", "how often")}).values
    {'epochs': 5}
    """
    known = [ScriptOption(option, OptionType(kind), *texts) for option, (kind, *texts) in options.items()]
    parser = _parser(name, title, known)
    parsed, others = parser.parse_known_args(words)
    if others:
        parser.error(_unknown(others[0], known))
    return OptionValues(tuple(known), vars(parsed))


def _words(name: str) -> list[str]:
    if name == "__main__":
        os.environ[_WORDS] = json.dumps(sys.argv[1:])
        return sys.argv[1:]
    words: list[str] = json.loads(os.environ.get(_WORDS, "[]")) if name == "__mp_main__" else []
    return words


@dataclass(frozen=True, slots=True)
class OptionValues:
    """The values of a command line, by the options' names."""

    options: tuple[ScriptOption, ...]
    values: Mapping[str, Any]

    def instead_of(self, *defaults: Any) -> tuple[Any, ...]:
        """The options' values in order: the given ones, or these defaults."""
        given = {
            item.name: item.type.whole(self.values[item.name]) for item in self.options if item.name in self.values
        }
        return tuple(given.get(item.name, value) for item, value in zip(self.options, defaults, strict=True))


@dataclass(frozen=True)
class OptionType:
    """The type of a value, from the text of an annotation."""

    text: str

    @cached_property
    def optional(self) -> bool:
        """Whether it can be None."""
        return self.text.endswith(_OPTIONAL)

    @cached_property
    def many(self) -> str | None:
        """`list` or `tuple` where it is several values."""
        found = _MANY.fullmatch(self.text.removesuffix(_OPTIONAL))
        return found["kind"] if found else None

    @cached_property
    def element(self) -> str:
        """The name of the type of one value."""
        alone = self.text.removesuffix(_OPTIONAL)
        found = _MANY.fullmatch(alone)
        return found["of"] if found else alone

    @cached_property
    def choices(self) -> tuple[Any, ...]:
        """The values that a `Literal[...]` allows."""
        if not self.element.startswith("Literal["):
            return ()
        return tuple(ast.literal_eval(f"({self.element.removeprefix('Literal[').removesuffix(']')},)"))

    def read(self, word: str) -> Any:
        """One value from its text; `ValueError` where it can't be one."""
        if self.optional and word == "None":
            return None
        if self.choices:
            return next(choice for choice in self.choices if str(choice) == word)
        return _READERS[self.element](word)

    def whole(self, value: Any) -> Any:
        """The value as the cell had it: several values are a list or a tuple."""
        return tuple(value) if self.many == "tuple" and value is not None else value


@dataclass(frozen=True, slots=True)
class ScriptOption:
    """One name of the cell."""

    name: str
    type: OptionType
    default: str
    help: str

    @property
    def flags(self) -> tuple[str, ...]:
        """Its spellings, the one to show first."""
        bare = self.name.strip("_") or self.name
        return tuple(dict.fromkeys(("--" + bare.replace("_", "-"), "--" + bare.replace("-", "_"))))

    @property
    def negated(self) -> tuple[str, ...]:
        """The flag that turns a yes-or-no option off."""
        return tuple(f"--no{flag[1:] if '-' in flag[2:] else '-' + flag[2:]}" for flag in self.flags)


def _truth(word: str) -> bool:
    return _TRUTHS[word.lower()]


_READERS: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "Path": Path, "bool": _truth}


class _OptionParser(argparse.ArgumentParser):
    """Prints an error in one line, once, however many processes the script has."""

    def error(self, message: str) -> NoReturn:
        if _speaks():
            print(f"{self.prog}: {message}\n`{self.prog} --help` lists the options.", file=sys.stderr)
        raise SystemExit(2)

    def print_help(self, file: Any = None) -> None:
        if _speaks():
            super().print_help(file)


def _parser(script: str, title: str, options: Sequence[ScriptOption]) -> _OptionParser:
    parser = _OptionParser(prog=script, description=title, allow_abbrev=False, add_help=True)
    # argparse knows -1 and -0.5 as values; a learning rate may be -1e-3
    parser._negative_number_matcher = re.compile(r"-(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$")
    for option in options:
        _add(parser, option)
    return parser


def _add(parser: _OptionParser, script_option: ScriptOption) -> None:
    help_text = " ".join(filter(None, (script_option.help, f"(default: {script_option.default})"))).replace("%", "%%")
    first, *others = script_option.flags
    option_type = script_option.type
    shape: dict[str, Any] = {"dest": script_option.name, "default": argparse.SUPPRESS}
    is_switch = option_type.element == "bool" and option_type.many is None
    if is_switch:
        shape["action"] = "store_true"
    else:
        choices = "{" + ",".join(map(str, option_type.choices)) + "}"
        shape["type"] = _reader(option_type)
        shape["metavar"] = choices if option_type.choices else option_type.element.upper()
    if option_type.many:
        shape["nargs"] = "*"
    parser.add_argument(first, **shape, help=help_text)
    for flag in others:
        parser.add_argument(flag, **shape, help=argparse.SUPPRESS)
    shape["action"], off = "store_false", f"the opposite of {first}"
    for flag in script_option.negated if is_switch else ():
        parser.add_argument(flag, **shape, help=off)
        off = argparse.SUPPRESS


def _reader(option_type: OptionType) -> Callable[[str], Any]:
    def read(word: str) -> Any:
        try:
            return option_type.read(word)
        except (ValueError, KeyError, StopIteration):
            choices = f"one of {', '.join(map(str, option_type.choices))}"
            wanted = choices if option_type.choices else _NAMES[option_type.element]
            raise argparse.ArgumentTypeError(f"{word!r} was given, and it takes {wanted}") from None

    return read


_NAMES = {"int": "a whole number", "float": "a number", "str": "text", "Path": "a path", "bool": "true or false"}


def _unknown(word: str, options: Sequence[ScriptOption]) -> str:
    if not word.startswith("-"):
        return f"{word!r} was given, and belongs to no option"
    flag = word.partition("=")[0]
    negated = [flag for option in options if option.type.element == "bool" for flag in option.negated]
    known = [*(flag for option in options for flag in option.flags), *negated]
    near = difflib.get_close_matches(flag, known, n=1)
    return f"there is no option {flag}" + (f"; did you mean {near[0]}?" if near else "")


def _speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"
