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
from pathlib import Path
from typing import Any, NoReturn

# Processes that import the script for its data loaders were started with other arguments than the script was.
_WORDS = "ACCELERATE_NB_SCRIPT_WORDS"
# `float`, `list[int]`, `tuple[str, ...]`, `Literal['a', 'b'] | None`
_TYPE = re.compile(r"(?:(list|tuple)\[(.+?)(?:, \.\.\.)?\]|(.+?))( \| None)?")
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
    known = [ScriptOption.of(option, *texts) for option, texts in options.items()]
    parser = _OptionParser(prog=name, description=title, allow_abbrev=False, add_help=True)
    # argparse knows -1 and -0.5 as values; a learning rate may be -1e-3
    parser._negative_number_matcher = re.compile(r"-(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$")
    for option in known:
        _add(parser, option)
    parsed, others = parser.parse_known_args(words)
    if others:
        parser.error(_unknown(others[0], known))
    tuples = {option.name for option in known if option.many == "tuple"}
    values = {name: tuple(value) if name in tuples else value for name, value in vars(parsed).items()}
    return OptionValues(tuple(options), values)


def _words(name: str) -> list[str]:
    if name == "__main__":
        os.environ[_WORDS] = json.dumps(sys.argv[1:])
        return sys.argv[1:]
    words: list[str] = json.loads(os.environ.get(_WORDS, "[]")) if name == "__mp_main__" else []
    return words


@dataclass(frozen=True, slots=True)
class OptionValues:
    """The values that a command line gives to some of the options, as their cell would have them."""

    names: tuple[str, ...]
    values: Mapping[str, Any]

    def instead_of(self, *defaults: Any) -> tuple[Any, ...]:
        """The options' values in order: the given ones, or these defaults."""
        return tuple(self.values.get(name, value) for name, value in zip(self.names, defaults, strict=True))


@dataclass(frozen=True, slots=True)
class ScriptOption:
    """One name of the cell; `flags` and `negated` are the spellings that set it and turn it off, the ones to show first."""

    name: str
    default: str
    help: str
    many: str | None  # `list` or `tuple` where it is several values
    element: str  # the name of the type of one value
    choices: tuple[Any, ...]  # the values that a `Literal[...]` allows
    is_optional: bool
    flags: tuple[str, ...]
    negated: tuple[str, ...]

    @classmethod
    def of(cls, name: str, kind: str, default: str, help_text: str) -> ScriptOption:
        """The option of a type as an annotation spells it."""
        found = _TYPE.fullmatch(kind)
        assert found is not None, f"no type of an option: {kind}"
        many, of, alone, optional = found.groups()
        values = (alone or "").removeprefix("Literal")
        choices = tuple(ast.literal_eval(f"({values[1:-1]},)")) if values != (alone or "") else ()
        bare = name.strip("_") or name
        spellings = tuple(dict.fromkeys((bare.replace("_", "-"), bare.replace("-", "_"))))
        is_switch = alone == "bool"
        flags, negated = (tuple(sign + spelling for spelling in spellings) for sign in ("--", "--no-"))
        return cls(
            name, default, help_text, many, of or alone, choices, bool(optional), flags, negated if is_switch else ()
        )

    def read(self, word: str) -> Any:
        """One value from its text; argparse's error where it can't be one."""
        if self.is_optional and word == "None":
            return None
        try:
            if self.choices:
                return next(choice for choice in self.choices if str(choice) == word)
            return _READERS[self.element](word)
        except (ValueError, KeyError, StopIteration):
            choices = f"one of {', '.join(map(str, self.choices))}"
            wanted = choices if self.choices else _NAMES[self.element]
            raise argparse.ArgumentTypeError(f"{word!r} was given, and it takes {wanted}") from None


_READERS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "Path": Path,
    "bool": lambda word: _TRUTHS[word.lower()],
}
_NAMES = {"int": "a whole number", "float": "a number", "str": "text", "Path": "a path", "bool": "true or false"}


class _OptionParser(argparse.ArgumentParser):
    """Prints an error in one line, once, however many processes the script has."""

    def error(self, message: str) -> NoReturn:
        if _speaks():
            print(f"{self.prog}: {message}\n`{self.prog} --help` lists the options.", file=sys.stderr)
        raise SystemExit(2)

    def print_help(self, file: Any = None) -> None:
        if _speaks():
            super().print_help(file)


def _add(parser: _OptionParser, option: ScriptOption) -> None:
    shape: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS}
    if option.negated:
        shape["action"] = "store_true"
    else:
        shape["type"] = option.read
        shape["metavar"] = f"{{{','.join(map(str, option.choices))}}}" if option.choices else option.element.upper()
    if option.many:
        shape["nargs"] = "*"
    help_text = " ".join(filter(None, (option.help, f"(default: {option.default})"))).replace("%", "%%")
    for flag in option.flags:
        parser.add_argument(flag, **shape, help=help_text if flag == option.flags[0] else argparse.SUPPRESS)
    shape["action"], off = "store_false", f"the opposite of {option.flags[0]}"
    for flag in option.negated:
        parser.add_argument(flag, **shape, help=off if flag == option.negated[0] else argparse.SUPPRESS)


def _unknown(word: str, options: Sequence[ScriptOption]) -> str:
    if not word.startswith("-"):
        return f"{word!r} was given, and belongs to no option"
    flag = word.partition("=")[0]
    known = [flag for option in options for flag in (*option.flags, *option.negated)]
    near = difflib.get_close_matches(flag, known, n=1)
    return f"there is no option {flag}" + (f"; did you mean {near[0]}?" if near else "")


def _speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"
