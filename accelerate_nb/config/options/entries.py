"""A setting that is a mapping with known keys, of which each has its own type and variable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from accelerate_nb.config.did_you_mean import did_you_mean
from accelerate_nb.config.value_types import Boolean, InvalidValue, NamedValues, OneOf, ValueType
from accelerate_nb.errors import NotYetError


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the mapping: its type, its variable, and the value that `accelerate launch` gives it where it is left out."""

    value_type: ValueType
    variable: str
    default: Any = None
    # Accelerate's launcher writes it in small letters
    is_lower: bool = False

    def text(self, value: Any) -> str | None:
        """The text of its variable; `None` where it has no value."""
        found = self.default if value is None else value
        if found is None:
            return None
        return str(found).lower() if self.is_lower or isinstance(found, bool) else str(found)


@dataclass(frozen=True, slots=True)
class Entries(NamedValues):
    """
    A mapping in Accelerate's words, with or without the prefix that its files write before each key.

    `ignored` are keys of earlier releases, which mean nothing any more.
    """

    PLACEHOLDER: ClassVar[str] = "JSON"
    prefix: str
    known: Mapping[str, Entry] = field(hash=False)
    ignored: frozenset[str] = frozenset()

    @property
    def expected(self) -> str:  # type: ignore[override]  # the keys are not the class's
        return f"a mapping with keys such as {next(iter(self.known))!r}"

    def check(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise InvalidValue
        found = {self._key(str(name)): entry for name, entry in value.items()}
        return {
            name: self._value(name, entry)
            for name, entry in found.items()
            if name not in self.ignored and entry is not None
        }

    def parse(self, text: str) -> dict[str, Any]:
        return self.check(NamedValues().parse(text))

    def variables(self, values: Mapping[str, Any]) -> dict[str, str]:
        """The variables that Accelerate's launcher sets for these values; what is left out has its default."""
        texts = {entry.variable: entry.text(values.get(name)) for name, entry in self.known.items()}
        return {variable: text for variable, text in texts.items() if text is not None}

    def _key(self, name: str) -> str:
        whole = name if name.startswith(self.prefix) else self.prefix + name
        if whole not in self.known and whole not in self.ignored:
            names = ", ".join(self.known)
            raise InvalidValue(f"There is no key {name!r}. {did_you_mean(whole, self.known, f'The keys are {names}.')}")
        return whole

    def _value(self, name: str, value: Any) -> Any:
        value_type = self.known[name].value_type
        try:
            return value_type.parse(value) if isinstance(value, str) else value_type.check(value)
        except InvalidValue as unfit:
            reason = [f"{name} is {value!r}, but should be {value_type.expected}.", *unfit.args]
            raise InvalidValue(" ".join(reason)) from None
        except NotYetError as error:
            raise NotYetError(f"of which {name}={value!r} requests {error}") from None


@dataclass(frozen=True, slots=True)
class CapitalWord(OneOf):
    """One of several words in capitals, written in any case."""

    def parse(self, text: str) -> str:
        word = text.strip().upper()
        if word in self.unsupported:
            raise NotYetError(f"what is not offered here yet. Use {self.expected}.")
        if word not in self.choices:
            raise InvalidValue(*filter(None, [did_you_mean(word, self.choices)]))
        return word


@dataclass(frozen=True, slots=True)
class BooleanOrWord:
    """True or False, or any word or number of an earlier version."""

    PLACEHOLDER: ClassVar[str] = ""
    expected: ClassVar[str] = "True or False"

    def check(self, value: Any) -> bool | str:
        return value if isinstance(value, bool) else self.parse(str(value))

    def parse(self, text: str) -> bool | str:
        try:
            return Boolean().parse(text)
        except InvalidValue:
            return text.strip().upper()


@dataclass(frozen=True, slots=True)
class Names:
    """Names, as a list or as one text with commas between them."""

    PLACEHOLDER: ClassVar[str] = "NAME,..."
    expected: ClassVar[str] = "names, such as 'A,B'"

    def check(self, value: Any) -> str:
        if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
            return ",".join(value)
        raise InvalidValue

    def parse(self, text: str) -> str:
        return text
