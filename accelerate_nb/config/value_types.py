"""Types of settings' values, one small object for each, which checks a value and parses a text; and the nearest known word to a wrong one."""

import json
import math
import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from accelerate_nb.errors import NotYetError


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", prefix: str = "") -> str:
    """A question that names the known word nearest to an unknown one; `otherwise` where none is near."""
    # `prefix` is put before the suggestion, and does not count in the comparison
    import difflib  # seldom needed, and slow to import

    # no name is longer, and the comparison takes the square of the length
    near = difflib.get_close_matches(word, list(known), n=1) if len(word) <= 100 else []
    return f"Did you mean {prefix}{near[0]}?" if near else otherwise


YES = frozenset({"1", "true", "yes", "y", "on", "t"})
NO = frozenset({"0", "false", "no", "n", "off", "f"})
# The bounds of a configuration that a person has written: in characters, and in levels of nested values.
LONGEST_TEXT = 50_000
DEEPEST_NESTING = 50
# So much of a value is quoted in an error.
_QUOTED = 300

Real = TypeVar("Real", int, float)


class InvalidValue(Exception):  # noqa: N818 - never leaves this folder: `Setting` turns it into a ConfigurationError
    """A value is not of the type; the setting adds its name and source. Its argument, if any, gives the reason."""


class ValueType:
    """The values that a setting can have: by themselves, any text."""

    # the placeholder after its flag in a help
    PLACEHOLDER = ""

    @property
    def expected(self) -> str:
        """A description of a valid value, to go after "should be"."""
        return "a text"

    def check(self, value: Any) -> Any:
        """The value as the setting keeps it; `InvalidValue` if it can't be one."""
        if not isinstance(value, str):
            raise InvalidValue
        return self.parse(value)

    def parse(self, text: str) -> Any:
        """The value of a text from the environment or a file; `InvalidValue` if it has none."""
        return text

    def from_file(self, value: Any) -> Any:
        """The value of an entry of a file, which may be written as a text."""
        return self.parse(value) if isinstance(value, str) else self.check(value)


@dataclass(frozen=True, slots=True)
class Integer(ValueType):
    """Whole numbers, numpy's included; `True` is none of them."""

    PLACEHOLDER = "N"
    minimum: float | None = None
    maximum: float | None = None
    also_as_text: bool = False

    @property
    def expected(self) -> str:
        return "a whole number" + _bounds(self.minimum, self.maximum)

    def check(self, value: Any) -> int:
        if self.also_as_text and isinstance(value, str):
            return self.parse(value)
        if isinstance(value, bool):
            raise InvalidValue
        try:
            number = operator.index(value)
        except TypeError:
            raise InvalidValue from None
        return _within(number, self.minimum, self.maximum)

    def parse(self, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise InvalidValue from None
        return _within(number, self.minimum, self.maximum)


@dataclass(frozen=True, slots=True)
class NodeCount(ValueType):
    """Numbers of machines, or the fewest and the most as torchrun spells them: the text `1:2`."""

    PLACEHOLDER = "N|MIN:MAX"
    expected = "a whole number that is at least 1, or the fewest and the most: '1:2'"

    def check(self, value: Any) -> int | str:
        return self.parse(value) if isinstance(value, str) else Integer(1).check(value)

    def parse(self, text: str) -> int | str:
        numbers = [Integer(1).parse(part) for part in text.split(":")]
        if len(numbers) > 2:
            raise InvalidValue
        return numbers[0] if len(numbers) == 1 else "{}:{}".format(*numbers)


@dataclass(frozen=True, slots=True)
class Number(ValueType):
    """Real numbers, neither infinite nor NaN."""

    PLACEHOLDER = "S"
    minimum: float | None = None
    maximum: float | None = None

    @property
    def expected(self) -> str:
        return "a number" + _bounds(self.minimum, self.maximum)

    def check(self, value: Any) -> float:
        if isinstance(value, (bool, str)):
            raise InvalidValue
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise InvalidValue from None
        if not math.isfinite(number):
            raise InvalidValue
        return _within(number, self.minimum, self.maximum)

    def parse(self, text: str) -> float:
        try:
            return self.check(float(text))
        except ValueError:
            raise InvalidValue from None


@dataclass(frozen=True, slots=True)
class Boolean(ValueType):
    """True or False."""

    expected = "True or False"

    def check(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise InvalidValue
        return value

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        if word not in YES | NO:
            raise InvalidValue
        return word in YES


@dataclass(frozen=True, slots=True)
class Text(ValueType):
    """Any text, or a path."""

    PLACEHOLDER = "TEXT"

    def check(self, value: Any) -> str:
        if not isinstance(value, (str, os.PathLike)):
            raise InvalidValue
        return str(value)


@dataclass(frozen=True, slots=True)
class DeviceIds(ValueType):
    """Accelerators of a machine: `all`, or numbers and names of them, each once."""

    PLACEHOLDER = "0,1,..."
    expected = "'all', or numbers of accelerators such as '0,2'"

    def check(self, value: Any) -> Any:
        # YAML reads a single one, `gpu_ids: 0`, as a number
        return ValueType.check(self, str(value) if type(value) is int else value)

    def parse(self, text: str) -> str:
        entries = [entry.strip() for entry in text.split(",")]
        if [entry.lower() for entry in entries] == ["all"]:
            return "all"
        # a number, one of a part (`0.1`), or a name such as NVIDIA gives (`GPU-8f…`)
        are_ids = (
            entry.startswith(("GPU-", "MIG-")) or all(part.isdecimal() for part in entry.split("."))
            for entry in entries
        )
        if len(set(entries)) < len(entries) or not all(are_ids):
            raise InvalidValue
        return ",".join(entries)


@dataclass(frozen=True, slots=True)
class HostList(ValueType):
    """Names of hosts, each with the number of its processes behind a colon where that is given; a text has commas between them."""

    PLACEHOLDER = "a,b:4,..."
    expected = "names of hosts such as ['a', 'b:4']"

    def check(self, value: Any) -> Any:
        are_names = isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value)
        return ValueType.check(self, ",".join(value) if are_names else value)

    def parse(self, text: str) -> str:
        entries = [entry.strip() for entry in text.split(",")]
        # a name that begins with a hyphen would be an option of the command that reaches it
        if any(not entry or entry.startswith("-") or any(map(str.isspace, entry)) for entry in entries):
            raise InvalidValue
        return ",".join(entries)


@dataclass(frozen=True, slots=True)
class Label(ValueType):
    """A short text that stands in one line, without control characters."""

    PLACEHOLDER = "TEXT"
    longest: int = 100

    @property
    def expected(self) -> str:
        return f"a text of 1 to {self.longest} printable characters"

    def parse(self, text: str) -> str:
        label = text.strip()
        if not 1 <= len(label) <= self.longest or not label.isprintable():
            raise InvalidValue
        return label


@dataclass(frozen=True, slots=True)
class LabelList(ValueType):
    """Labels, each once; a text has commas between them."""

    PLACEHOLDER = "a,b,..."
    expected = "at most 20 texts of 1 to 40 printable characters, without commas"

    def check(self, value: Any) -> str:
        if isinstance(value, str):
            return self.parse(value)
        if not isinstance(value, (list, tuple)):
            raise InvalidValue
        labels = list(dict.fromkeys(map(Label(40).check, value)))
        if len(labels) > 20 or any("," in label for label in labels):
            raise InvalidValue
        return ",".join(labels)

    def parse(self, text: str) -> str:
        return self.check(text.split(",")) if text.strip() else ""


@dataclass(frozen=True, slots=True)
class OneOf(ValueType):
    """One of several words, all small or all capitals, written in any case; `unsupported` are those that are known and not supported yet."""

    choices: tuple[str, ...]
    unsupported: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        return f"one of {', '.join(map(repr, self.choices))}"

    def parse(self, text: str) -> str:
        word = text.strip().upper() if self.choices[0].isupper() else text.strip().lower()
        if word in self.unsupported:
            raise NotYetError(f"which is not offered here yet. Use {self.expected}.")
        if word not in self.choices:
            raise InvalidValue(*filter(None, [did_you_mean(word, self.choices)]))
        return word


@dataclass(frozen=True, slots=True)
class NamedValues(ValueType):
    """A mapping from texts to anything; a text of it is `name=value, name=value`, or JSON."""

    PLACEHOLDER = "K=V,..."
    expected = "a mapping"

    def check(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise InvalidValue
        return dict(value)

    def parse(self, text: str) -> dict[str, Any]:
        if text.lstrip().startswith("{"):
            try:
                return self.check(parse_json(text))
            except ValueError:
                raise InvalidValue from None
        pairs = (part.partition("=") for part in text.split(",") if part)
        return {name.strip(): value.strip() for name, _, value in pairs}


def parse_json(text: str) -> Any:
    """The content of JSON that a person has written; `ValueError` where it is none, or longer or deeper than such a text."""
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"it has {len(text):,} characters, more than {LONGEST_TEXT:,}")
    too_deep = f"it is nested deeper than {DEEPEST_NESTING} levels"
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [content]
    for _ in range(DEEPEST_NESTING):
        level = [
            part
            for item in level
            if isinstance(item, (dict, list))
            for part in (item.values() if isinstance(item, dict) else item)
        ]
    if level:
        raise ValueError(too_deep)
    return content


def brief(value: object) -> str:
    """A value as an error quotes it: cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # Python writes no integer of more than 4,300 digits
        return f"a value of type {type(value).__name__} that is too large to be shown"
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}... ({len(text):,} characters)"


def _bounds(minimum: float | None, maximum: float | None) -> str:
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    if minimum is not None:
        return f", at least {minimum}"
    return "" if maximum is None else f", at most {maximum}"


def _within(number: Real, minimum: float | None, maximum: float | None) -> Real:
    if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
        raise InvalidValue
    return number
