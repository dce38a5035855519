"""How a setting is said once: its type, default, choices, help, flag, variable, key and form field are one line."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from accelerate_nb.config.kinds import Kind, Number, OneOf, Table, Text, Unfit, Whole, YesNo
from accelerate_nb.config.nearest import meant
from accelerate_nb.errors import ConfigurationError, NotYetError

T = TypeVar("T")

# The headings under which settings are shown, in their order.
GROUPS: dict[str, str] = {
    "where": "Where it runs",
    "many": "How many processes",
    "precision": "Precision",
    "training": "Training",
    "compiling": "Compiling",
    "sharding": "Sharding",
    "checkpoints": "Checkpoints",
    "machines": "Several machines",
    "failures": "Time limits, failures",
    "shown": "How it is shown",
    "kept": "What comes back, what is kept",
    "more": "More",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What a field's own line says beyond its name, type and default."""

    help: str
    minimum: float | None
    maximum: float | None
    also_as_text: bool
    variables: tuple[str, ...]
    keys: tuple[str, ...]
    later: tuple[str, ...]
    group: str
    advanced: bool


def setting(
    default: Any,
    *,
    help: str,
    minimum: float | None = None,
    maximum: float | None = None,
    also_as_text: bool = False,
    variables: Iterable[str] = (),
    keys: Iterable[str] = (),
    later: Iterable[str] = (),
    group: str = "more",
    advanced: bool = False,
) -> Any:
    """
    A field of a settings class. Its choices are those of its `Literal` type; an `Annotated` one brings its kind.

    `variables` and `keys` are further names of it, in the environment and in Hugging Face's configuration file; its own
    are `ACCELERATE_NB_<NAME>` and `<name>`. `also_as_text` lets an argument be a number written as a text. `later` holds
    choices that are known and not offered yet. `group` is the key in `GROUPS` of the heading under which a form shows it;
    an `advanced` one is folded there.

    >>> num_processes: int | None = setting(None, minimum=1, help="How many processes run the function.")
    """
    said = _Said(
        help=help,
        minimum=minimum,
        maximum=maximum,
        also_as_text=also_as_text,
        variables=tuple(variables),
        keys=tuple(keys),
        later=tuple(later),
        group=group,
        advanced=advanced,
    )
    return field(default=default, metadata={"said": said})


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that a front end needs to know about one setting."""

    name: str
    kind: Kind
    default: Any
    help: str
    variables: tuple[str, ...]
    keys: tuple[str, ...]
    section: str
    group: str
    advanced: bool
    nullable: bool

    @property
    def flag(self) -> str:
        """Its spelling on a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it can be, where it can be only some."""
        return self.kind.choices if isinstance(self.kind, OneOf) else ()

    @property
    def later(self) -> tuple[str, ...]:
        """The words that are known and not offered yet."""
        return self.kind.later if isinstance(self.kind, OneOf) else ()

    def check(self, value: Any, where: str) -> Any:
        """The value of an argument, as the setting keeps it."""
        return self._fitting(self.kind.check, value, where)

    def parse(self, text: str, where: str) -> Any:
        """The value that a text stands for."""
        return self._fitting(self.kind.parse, text, where)

    def _fitting(self, read: Callable[[Any], Any], value: Any, where: str) -> Any:
        try:
            return read(value)
        except Unfit as unfit:
            advice = [*unfit.args, "Pass such a value, or leave it out."]
            raise ConfigurationError(
                f"{where} {value!r}, but {self.name} should be {self.kind.expected}. {' '.join(advice)} ({self.help})"
            ) from None
        except NotYetError as error:
            raise NotYetError(f"{where} {value!r}, {error}") from None


def settings(section: type) -> tuple[Setting, ...]:
    """The settings of a settings class, in the order in which it says them."""
    hints = get_type_hints(section, include_extras=True)
    return tuple(
        _described(one.name, hints[one.name], one.default, one.metadata["said"], section) for one in fields(section)
    )


def _described(name: str, hint: Any, default: Any, said: _Said, section: type) -> Setting:
    return Setting(
        name=name,
        kind=_kind(hint, said),
        default=default,
        help=said.help,
        variables=(f"ACCELERATE_NB_{name.upper()}", *said.variables),
        keys=(name, *said.keys),
        section=section.__name__.lower(),
        group=said.group,
        advanced=said.advanced,
        nullable=hint is not _without_none(hint),
    )


def _kind(hint: Any, said: _Said) -> Kind:
    plain = _without_none(hint)
    if get_origin(plain) is Annotated:
        kind: Kind = plain.__metadata__[0]
        return kind
    if get_origin(plain) is Literal:
        return OneOf(get_args(plain), said.later)
    makers: dict[Any, Callable[[], Kind]] = {
        int: lambda: Whole(said.minimum, said.maximum, said.also_as_text),
        float: lambda: Number(said.minimum, said.maximum),
        bool: YesNo,
        str: Text,
        Mapping: Table,
    }
    return makers[get_origin(plain) or plain]()


def _without_none(hint: Any) -> Any:
    if get_origin(hint) not in {Union, types.UnionType}:
        return hint
    rest = [part for part in get_args(hint) if part is not type(None)]
    assert len(rest) == 1, f"a setting has one type, with or without None: {hint}"
    return rest[0]


def unknown_setting(name: str, known: Iterable[str]) -> ConfigurationError:
    """The error for a setting that nobody knows: it names the nearest one, then all."""
    names = sorted(known)
    hint = meant(name, names, "Leave it out.")
    return ConfigurationError(f"There is no setting {name!r}. {hint} The settings are {', '.join(names)}.")


class Unsaid:
    """
    The mark of a default in a signature: the caller did not say it, so that the environment or a file may.

    `Setting`s whose default is `None` need no mark: `None` is never said.
    """


class _UnsaidText(Unsaid, str):
    __slots__ = ()


class _UnsaidWhole(Unsaid, int):
    pass


class _UnsaidNumber(Unsaid, float):
    pass


def unsaid(value: T) -> T:
    """
    A default that equals `value`, reads like it, and can be told from the same value said by a caller.

    >>> def launcher(mixed_precision: str = unsaid("no")) -> None: ...
    """
    marked: Any = {str: _UnsaidText, int: _UnsaidWhole, float: _UnsaidNumber}[type(value)](value)
    return marked  # type: ignore[no-any-return]


def said(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a caller said: neither `None` nor a marked default."""
    return {name: value for name, value in arguments.items() if value is not None and not isinstance(value, Unsaid)}
