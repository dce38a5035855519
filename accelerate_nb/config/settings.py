"""Declaration of settings: type, default, choices, help, flag, variable, key and form field are one line."""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from accelerate_nb.config import value_types
from accelerate_nb.config.environment import PREFIX
from accelerate_nb.errors import ConfigurationError, NotYetError, UnknownSettingError
from accelerate_nb.user_warnings import warn_user

T = TypeVar("T")

# The headings under which settings are shown, in their order.
GROUPS: dict[str, str] = {
    "where": "Engine and devices",
    "many": "Processes",
    "precision": "Precision",
    "training": "Training",
    "compiling": "Compiling",
    "sharding": "Sharding",
    "checkpoints": "Checkpoints",
    "machines": "Several machines",
    "failures": "Time limits, failures",
    "shown": "Display",
    "kept": "Results and folders",
    "more": "More",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _SettingDetails:
    """Details of a setting beyond its name, type and default."""

    help: str
    label: str = ""
    minimum: float | None = None
    maximum: float | None = None
    also_as_text: bool = False  # an argument may be a number written as a text
    # more names, beside ACCELERATE_NB_<NAME> and <name>: in the environment, and in Hugging Face's configuration file
    variables: Sequence[str] = ()
    keys: Sequence[str] = ()
    unsupported: tuple[str, ...] = ()  # choices that are known and not offered yet
    deprecated: Sequence[str] = ()  # former names, which work and warn
    group: str = "more"  # the key in `GROUPS`
    advanced: bool = False  # a form shows it behind the others of its group


def setting(default: Any, **details: Any) -> Any:
    """A field of a settings class; `details` are the fields of `_SettingDetails`, choices those of its `Literal` type."""
    return field(default=default, metadata={"details": _SettingDetails(**details)})


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that a front end needs to know about one setting."""

    name: str
    value_type: value_types.ValueType
    default: Any
    help: str
    label: str
    variables: tuple[str, ...]
    keys: tuple[str, ...]
    deprecated: tuple[str, ...]
    section: str
    group: str
    advanced: bool
    nullable: bool

    @property
    def flag(self) -> str:
        """Its spelling on a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def worker_variable(self) -> str:
        """The variable through which the `Accelerator` in a worker gets it: Accelerate's, where it has one."""
        return (*self.variables[1:], *self.variables)[0]

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it can have, where it can have only some."""
        return self.value_type.choices if isinstance(self.value_type, value_types.OneOf) else ()

    @property
    def unsupported(self) -> tuple[str, ...]:
        """The values that are known and not supported yet."""
        return self.value_type.unsupported if isinstance(self.value_type, value_types.OneOf) else ()

    def check(self, value: Any, where: str) -> Any:
        """The value of an argument, as the setting keeps it."""
        return self._fitting(self.value_type.check, value, where)

    def parse(self, text: str, where: str) -> Any:
        """The value of a text."""
        return self._fitting(self.value_type.parse, text, where)

    def in_worker(self, environment: Mapping[str, str]) -> Any:
        """The value that the environment of a worker gives it; `None` where its variable is not set, or empty."""
        text = environment.get(self.worker_variable)
        return self.parse(text, f"The variable {self.worker_variable} is") if text else None

    def _fitting(self, read: Callable[[Any], Any], value: Any, where: str) -> Any:
        try:
            return read(value)
        except value_types.InvalidValue as unfit:
            advice = [*unfit.args, "Pass such a value, or leave it out."]
            raise ConfigurationError(
                f"{where} {value_types.brief(value)}, but {self.name} should be {self.value_type.expected}. {' '.join(advice)} ({self.help})"
            ) from None
        except NotYetError as error:
            raise NotYetError(f"{where} {value_types.brief(value)}, {error}") from None


def with_current_names(values: Mapping[str, Any], settings: Iterable[Setting]) -> dict[str, Any]:
    """The values under the current names of their settings; a deprecated name warns, and both are an error."""
    current = {former: setting.name for setting in settings for former in setting.deprecated}
    for former in current.keys() & values.keys():
        if current[former] in values:
            raise ConfigurationError(
                f"{former} and {current[former]} were both given, and are the same setting. Pass {current[former]} alone."
            )
        warn_deprecated(former, current[former])
    return {current.get(name, name): value for name, value in values.items()}


def warn_deprecated(former: str, name: str) -> None:
    """Warn that a former name of a setting works for one more release, at the user's own line."""
    warn_user(f"{former} is now called {name}; the former name works until the next release.", FutureWarning)


def section_name(section: type) -> str:
    """The name of a settings class among the fields of `RunConfig`: `launching` for `LaunchingConfig`."""
    return section.__name__.removesuffix("Config").removesuffix("Options").lower()


@cache
def settings(section: type) -> tuple[Setting, ...]:
    """The settings of a settings class, in the order of its fields."""
    annotations = get_type_hints(section, include_extras=True)
    found = []
    for item in fields(section):
        name, details = item.name, item.metadata["details"]
        plain = annotations[name]
        if nullable := get_origin(plain) in {Union, types.UnionType}:
            # a setting has one type, with or without None
            (plain,) = (part for part in get_args(plain) if part is not type(None))
        former = (PREFIX + word.upper() for word in details.deprecated)
        found.append(
            Setting(
                name=name,
                value_type=_value_type(plain, details),
                default=item.default,
                help=details.help,
                label=details.label or name.replace("_", " ").capitalize(),
                variables=(PREFIX + name.upper(), *details.variables, *former),
                keys=(name, *details.keys, *details.deprecated),
                deprecated=tuple(details.deprecated),
                section=section_name(section),
                group=details.group,
                advanced=details.advanced,
                nullable=nullable,
            )
        )
    return tuple(found)


def _value_type(plain: Any, details: _SettingDetails) -> value_types.ValueType:
    if get_origin(plain) is Annotated:
        value_type: value_types.ValueType = plain.__metadata__[0]
        return value_type
    if get_origin(plain) is Literal:
        return value_types.OneOf(get_args(plain), details.unsupported)
    makers: dict[Any, Callable[[], value_types.ValueType]] = {
        int: lambda: value_types.Integer(details.minimum, details.maximum, details.also_as_text),
        float: lambda: value_types.Number(details.minimum, details.maximum),
        bool: value_types.Boolean,
        str: value_types.Text,
        Mapping: value_types.NamedValues,
    }
    return makers[get_origin(plain) or plain]()


def unknown_setting(name: str, known: Iterable[str]) -> UnknownSettingError:
    """The error for an unknown setting: it names the nearest one, or else all."""
    names = sorted(known)
    annotation = value_types.did_you_mean(name, names, f"Leave it out. The settings are {', '.join(names)}.")
    return UnknownSettingError(f"There is no setting {name!r}. {annotation}")


class Unset:
    """The mark of a default in a signature: the caller did not give it, so the environment or a file may."""

    def __reduce__(self) -> tuple[Any, ...]:
        # its class is made for it, and has no name by which another process finds it
        return unset, (type(self).__bases__[1](self),)


def unset(value: T) -> T:
    """A default that equals `value`, reads like it, and can be told apart from the same value given by a caller."""
    marked: T = type("Unset", (Unset, type(value)), {})(value)
    return marked


def given_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a caller gave: neither `None` nor a marked default."""
    return {name: value for name, value in arguments.items() if value is not None and not isinstance(value, Unset)}
