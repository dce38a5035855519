"""The meaning of a flag of Hugging Face's `accelerate launch` here, and the types of its values that no setting has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from accelerate_nb.config.value_types import Boolean, InvalidValue, ValueType


@dataclass(frozen=True, slots=True)
class SettingFlag:
    """The flag is a setting of this package."""

    name: str


@dataclass(frozen=True, slots=True)
class LaunchFlag:
    """The flag is one of `accelerate-nb launch` itself."""


@dataclass(frozen=True, slots=True)
class EnvironmentFlag:
    """The flag is a variable in the environment of every worker, as Accelerate's own launch sets it."""

    names: tuple[str, ...]

    def of(self, value: Any) -> dict[str, str]:
        """The variables for a value; a list has one for each of its parts."""
        values = value if isinstance(value, tuple) else (value,)
        return dict(zip(self.names, map(str, values), strict=True))


@dataclass(frozen=True, slots=True)
class FixedSettingsFlag:
    """The flag gives settings of this package these values."""

    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TpuFlag:
    """The flag is a TPU setting (a field of `TpusConfig`), which matters only for a launch on TPUs."""

    field: str
    # the value of a flag without a value
    value: bool = True

    @property
    def why(self) -> str:
        """The reason for which it changes nothing elsewhere."""
        return "it is an option of a TPU, which --tpu requests"


@dataclass(frozen=True, slots=True)
class IgnoredFlag:
    """The flag changes nothing here."""

    why: str


@dataclass(frozen=True, slots=True)
class OptionOfUnused:
    """The flag is an option of a feature that was not requested: it changes nothing, here as there."""

    what: str
    requested_by: str

    @property
    def why(self) -> str:
        """The reason."""
        return f"it is an option of {self.what}, which {self.requested_by} requests"


@dataclass(frozen=True, slots=True)
class EntryFlag(OptionOfUnused):
    """The flag is an entry of a setting that is a mapping, where its feature was requested."""

    setting: str


@dataclass(frozen=True, slots=True)
class FeatureFlag:
    """The flag requests a feature whose options are the entries of a setting; `entries` are those that come with it."""

    setting: str
    entries: Mapping[str, Any]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UnsupportedFlag:
    """The flag requests a feature that is not offered yet."""

    what: str


Becomes: TypeAlias = (
    SettingFlag
    | LaunchFlag
    | FixedSettingsFlag
    | TpuFlag
    | EnvironmentFlag
    | IgnoredFlag
    | OptionOfUnused
    | EntryFlag
    | FeatureFlag
    | UnsupportedFlag
)


@dataclass(frozen=True, slots=True)
class ThreeBooleans:
    """Three times yes or no: `false,false,true`."""

    PLACEHOLDER: ClassVar[str] = "BOOL,BOOL,BOOL"
    expected: ClassVar[str] = "three of true and false, such as 'false,false,true'"

    def check(self, value: Any) -> tuple[bool, ...]:
        """The values, from their text."""
        return self.parse(str(value))

    def parse(self, text: str) -> tuple[bool, ...]:
        """The values."""
        parts = tuple(Boolean().parse(part) for part in text.split(","))
        if len(parts) != 3:
            raise InvalidValue
        return parts


class _MatchingText:
    """A text that matches a pattern as a whole."""

    PATTERN: ClassVar[str]
    expected: ClassVar[str]

    def check(self, value: Any) -> str:
        """The text, where it is one."""
        return self.parse(str(value))

    def parse(self, text: str) -> str:
        """The text, where it is one."""
        if not re.fullmatch(self.PATTERN, text, re.DOTALL):
            raise InvalidValue
        return text


class RedirectedStreams(_MatchingText):
    """The streams to redirect: torchrun's number (0 none, 1 stdout, 2 stderr, 3 both), or one for each rank."""

    PLACEHOLDER: ClassVar[str] = "0-3"
    PATTERN = r"[0-3]|\d+:[0-3](,\d+:[0-3])*,?"
    expected = "0 (none), 1 (stdout), 2 (stderr), 3 (both), or one for each rank, such as '0:3,1:1'"


class Assignment(_MatchingText):
    """A variable of the environment with its value."""

    PLACEHOLDER: ClassVar[str] = "NAME=VALUE"
    PATTERN = r"[A-Za-z_]\w*=.*"
    expected = "a name and a value, such as 'A=1'"


@dataclass(frozen=True, slots=True)
class HfFlag:
    """A flag of theirs: how it is written, which values it takes (`None`: none), and what becomes of it."""

    name: str
    becomes: Becomes
    value_type: ValueType | None = None
    repeats: bool = False
    # its text in the help; the help leaves those out that have none
    help: str = ""
