"""The options of an exported script: the names that its `parameters` cell gave a value."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from accelerate_nb.config.value_types import did_you_mean

# Processes that import the script for its data loaders were started with other arguments than the script was.
_WORDS = "ACCELERATE_NB_SCRIPT_WORDS"
# `float`, `list[int]`, `tuple[str, ...]`, `Literal['a', 'b'] | None`
_TYPE = re.compile(r"(?:(list|tuple)\[(.+?)(?:, \.\.\.)?\]|(.+?))( \| None)?")
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parameters(name: str, file: str, title: str, /, **options: tuple[str, str, str]) -> OptionValues:
    """Read the command line: `--learning-rate 0.1` gives `learning_rate` another value."""
    # `name` is the script's `__name__`; each option is its type, as an annotation spells it (`list[int]`,
    # `str | None`), its default and its help. What can't be understood ends the script with exit code 2. In an imported
    # module, nothing is read.
    if name == "__main__":
        os.environ[_WORDS] = json.dumps(sys.argv[1:])
    words = json.loads(os.environ.get(_WORDS, "[]")) if name in {"__main__", "__mp_main__"} else []
    return read(words, os.path.basename(file), title, options)


def read(words: Sequence[str], name: str, title: str, options: Mapping[str, tuple[str, str, str]]) -> OptionValues:
    """The values of options in `words`; a help names the program by `name`."""
    parser = _OptionParser(prog=name, description=title, allow_abbrev=False)
    # argparse knows -1 and -0.5 as values; a learning rate may be -1e-3
    parser._negative_number_matcher = re.compile(r"-(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$")
    for option, texts in options.items():
        _add(parser, option, *texts)
    parsed, others = parser.parse_known_args([_dashed(word) for word in words])
    if others:
        word = others[0]
        if not word.startswith("-"):
            parser.error(f"{word!r} was given, and belongs to no option")
        flag = word.partition("=")[0]
        parser.error(f"there is no option {flag}. {did_you_mean(flag, parser._option_string_actions)}")
    tuples = {option for option, (kind, _, _) in options.items() if kind.startswith("tuple")}
    values = {name: tuple(value) if name in tuples else value for name, value in vars(parsed).items()}
    return OptionValues(tuple(options), values)


def _dashed(word: str) -> str:
    """A word of the command line with its flag as it is declared: --batch_size is --batch-size too, and --list_ is --list."""
    flag, equals, value = word.partition("=")
    return f"{_flag(re.sub('-_+', '-', flag[2:]))}{equals}{value}" if flag.startswith("--") else word


def _flag(option: str) -> str:
    # scripts that were exported by 0.2.0 may have an option `_`
    return f"--{(option.strip('_') or option).replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class OptionValues:
    """The values that a command line gives to some of the options, as their cell would have them."""

    names: tuple[str, ...]
    values: Mapping[str, Any]

    def instead_of(self, *defaults: Any) -> tuple[Any, ...]:
        """The options' values in order: the given ones, or these defaults."""
        return tuple(self.values.get(name, value) for name, value in zip(self.names, defaults, strict=True))


_READERS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "text"),
    "Path": (Path, "a path"),
    "bool": (lambda word: _TRUTHS[word.lower()], "true or false"),
}


class _OptionParser(argparse.ArgumentParser):
    """Prints an error in one line, once, however many processes the script has."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists the options.\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super()._print_message(message, file)


def _add(parser: argparse.ArgumentParser, name: str, kind: str, default: str, help_text: str) -> None:
    """Declare an option of a type as an annotation spells it."""
    found = _TYPE.fullmatch(kind)
    assert found is not None, f"no type of an option: {kind}"
    many, of, alone, optional = found.groups()
    shape: dict[str, Any] = {"nargs": "*"} if many else {}
    if alone == "bool":
        shape = {"action": argparse.BooleanOptionalAction}
    elif (alone or "").startswith("Literal"):
        choices = {str(choice): choice for choice in ast.literal_eval(f"({alone.removeprefix('Literal')[1:-1]},)")}
        shape["type"] = _reader(choices.__getitem__, f"one of {', '.join(choices)}", is_optional=bool(optional))
        shape["metavar"] = f"{{{','.join(choices)}}}"
    else:
        read, wanted = _READERS[of or alone]
        shape |= {"type": _reader(read, wanted, is_optional=bool(optional)), "metavar": (of or alone).upper()}
    text = " ".join(filter(None, (help_text, f"(default: {default})"))).replace("%", "%%")
    # set afterwards: the action of a bool adds a default of its own on some Pythons
    parser.add_argument(_flag(name), **shape, dest=name, default=argparse.SUPPRESS).help = text


def _reader(read: Callable[[str], Any], wanted: str, *, is_optional: bool) -> Callable[[str], Any]:
    """Gives one value from its text; argparse's error where it can't be one."""

    def value(word: str) -> Any:
        if is_optional and word == "None":
            return None
        try:
            return read(word)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{word!r} was given, and it takes {wanted}") from None

    return value
