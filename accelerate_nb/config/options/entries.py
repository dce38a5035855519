"""A setting that is a mapping with known keys, of which each has its own type, variable and default."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from accelerate_nb.config.value_types import Boolean, InvalidValue, NamedValues, OneOf, ValueType, did_you_mean
from accelerate_nb.errors import ConfigurationError, NotYetError


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the mapping: its type and its variable."""

    # `launched`: what `accelerate launch` gives the variable where the key is left out; `default`: what a training has
    # without the variable

    value_type: ValueType
    variable: str
    launched: Any = None
    default: Any = None
    # Accelerate's launcher writes it in small letters
    is_lower: bool = False

    def text(self, value: Any) -> str | None:
        """The text of its variable; `None` where it has no value."""
        found = self.launched if value is None else value
        if found is None:
            return None
        return str(found).lower() if self.is_lower or isinstance(found, bool) else str(found)

    def read(self, environment: Mapping[str, str], name: str) -> Any:
        """The value of its variable; its default where that is not set, or empty. An error names the option as Accelerate does."""
        text = environment.get(self.variable)
        if not text:
            return self.default
        try:
            return self.value_type.parse(text)
        except InvalidValue as unfit:
            reason = [
                f"Invalid {name}: {text}.",
                f"The variable {self.variable} is {text!r}, but should be {self.value_type.expected}.",
                *unfit.args,
            ]
            raise ConfigurationError(f"{' '.join(reason)} Correct or unset it.") from None


@dataclass(frozen=True, slots=True)
class Entries(NamedValues):
    """A mapping in Accelerate's words, with or without the prefix that its files write before each key."""

    # `ignored` are keys of earlier releases, which mean nothing any more

    PLACEHOLDER = "JSON"
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

    def read(self, name: str, environment: Mapping[str, str]) -> Any:
        """The value that the environment gives to one key."""
        return self.known[self._key(name)].read(environment, name.removeprefix(self.prefix))

    def choices(self, name: str) -> tuple[str, ...]:
        """The words that a key can have, where it can have only some."""
        value_type = self.known[self._key(name)].value_type
        return value_type.choices if isinstance(value_type, OneOf) else ()

    def complete(self, plugin: Any, environment: Mapping[str, str]) -> None:
        """Give each option of a plugin that is `None` the value that the environment has for it."""
        for item in fields(plugin):
            if item.metadata and getattr(plugin, item.name) is None:
                setattr(plugin, item.name, self.read(item.metadata["key"] or item.name, environment))

    def _key(self, name: str) -> str:
        whole = name if name.startswith(self.prefix) else self.prefix + name
        if whole not in self.known and whole not in self.ignored:
            names = ", ".join(self.known)
            raise InvalidValue(f"There is no key {name!r}. {did_you_mean(whole, self.known, f'The keys are {names}.')}")
        return whole

    def _value(self, name: str, value: Any) -> Any:
        value_type = self.known[name].value_type
        try:
            return value_type.from_file(value)
        except InvalidValue as unfit:
            reason = [f"{name} is {value!r}, but should be {value_type.expected}.", *unfit.args]
            raise InvalidValue(" ".join(reason)) from None
        except NotYetError as error:
            raise NotYetError(f"of which {name}={value!r} was requested, {error}") from None


@dataclass(frozen=True, slots=True)
class StrategyOptions:
    """The options of a strategy, and how Accelerate spells it."""

    # `distributed_type` is the word of files for it, `variable` turns it on in a worker, `key` names its options, as a
    # setting and in files

    name: str
    distributed_type: str
    variable: str
    key: str
    entries: Entries

    def variables(self, options: Mapping[str, Any] | None) -> dict[str, str]:
        """The variables through which an `Accelerator` trains so, as Accelerate's launcher sets them."""
        return {self.variable: "true", **self.entries.variables(options or {})}

    def is_requested(self, content: Mapping[str, Any]) -> bool:
        """Whether the content of a file is for this strategy."""
        return str(content.get("distributed_type")).upper() == self.distributed_type

    def with_strategy(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The content of a file, in settings; one for something else stays as it is."""
        return {**content, "strategy": self.name} if self.is_requested(content) else dict(content)

    def for_accelerate(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The content of a file with this strategy, as Accelerate's own tools understand it, too."""
        options = dict(content.get(self.key) or {})
        return {**content, "distributed_type": self.distributed_type, self.key: options}


def option(
    value_type: ValueType, default: Any = None, *, launched: Any = None, key: str = "", variable: str = ""
) -> Any:
    """A field of a plugin that is an entry of a setting, too: where it is `None`, its variable is read."""
    # `key` and `variable` stand where these are not made of the field's name by the prefixes of the others
    return field(default=None, metadata={"entry": Entry(value_type, variable, launched, default), "key": key})


def entries_of(plugin: type, prefix: str, variable_prefix: str) -> dict[str, Entry]:
    """The entries that are declared by the fields of a plugin, by their keys."""
    return {
        item.metadata["key"] or prefix + item.name: replace(
            item.metadata["entry"], variable=item.metadata["entry"].variable or variable_prefix + item.name.upper()
        )
        for item in fields(plugin)
        if item.metadata
    }


@dataclass(frozen=True, slots=True)
class OrAuto(ValueType):
    """A value of another type, or the word that leaves it to others."""

    value_type: ValueType

    @property
    def expected(self) -> str:
        return f"{self.value_type.expected}, or 'auto'"

    def check(self, value: Any) -> Any:
        return value if value == "auto" else self.value_type.check(value)

    def parse(self, text: str) -> Any:
        return text if text == "auto" else self.value_type.parse(text)


@dataclass(frozen=True, slots=True)
class BooleanOrWord(ValueType):
    """True or False, or any word or number of an earlier version."""

    expected = "True or False"

    def check(self, value: Any) -> bool | str:
        return value if isinstance(value, bool) else self.parse(str(value))

    def parse(self, text: str) -> bool | str:
        try:
            return Boolean().parse(text)
        except InvalidValue:
            return text.strip().upper()


@dataclass(frozen=True, slots=True)
class Names(ValueType):
    """Names, as a list or as one text with commas between them."""

    PLACEHOLDER = "NAME,..."
    expected = "names, such as 'A,B'"

    def check(self, value: Any) -> str:
        if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
            return ",".join(value)
        raise InvalidValue
