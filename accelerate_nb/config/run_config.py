"""The whole wish, resolved from what was said in a call, in the environment and in a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

from accelerate_nb.config import later, tpus
from accelerate_nb.config.fields import GROUPS, Setting, said, settings, unknown_setting
from accelerate_nb.config.launching import Launching
from accelerate_nb.config.training import Training

Section = TypeVar("Section", Launching, Training)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run should be."""

    launching: Launching = field(default_factory=Launching)
    training: Training = field(default_factory=Training)

    def environ(self) -> dict[str, str]:
        """What every worker's environment says of it."""
        return {**self.launching.environ(), **self.training.environ()}


@cache
def all_settings() -> tuple[Setting, ...]:
    """Every setting there is."""
    return (*settings(Launching), *settings(Training))


@cache
def grouped() -> dict[str, tuple[Setting, ...]]:
    """Every setting under the key of its heading in `GROUPS`, in the order in which a form or a help shows them."""
    return {key: own for key in GROUPS if (own := tuple(one for one in all_settings() if one.group == key))}


def resolve(
    arguments: Mapping[str, Any], environment: Mapping[str, str], file: Mapping[str, Any] | None = None
) -> RunConfig:
    """
    What a run should be: an argument wins over a variable of the environment, that over the file, that over the default.

    An argument that is `None`, or a default marked by `unsaid`, was not said. `ConfigurationError` tells which value can't
    be one, or which argument is unknown; `NotYetError` what is known and not offered yet, also of what the file asks for.

    >>> resolve({"num_processes": 2}, {"ACCELERATE_MIXED_PRECISION": "bf16"}).training.mixed_precision
    'bf16'
    """
    known = {one.name for one in all_settings()}
    for name in arguments:
        if name not in known:
            raise unknown_setting(name, known)
    later.refuse(file or {})
    places = _places(arguments, environment, file)
    return RunConfig(launching=_made(Launching, places), training=_made(Training, places))


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a setting's value was said: `place` is for people, and empty for a default."""

    value: Any
    place: str = ""


def origins(
    arguments: Mapping[str, Any], environment: Mapping[str, str], file: Mapping[str, Any] | None = None
) -> dict[str, Origin]:
    """
    Where each setting gets its value from, by the same rules as in `resolve`, which tells what can't be a value.

    >>> origins({}, {"ACCELERATE_USE_CPU": "1"})["cpu"]
    Origin(value=True, place='the variable ACCELERATE_USE_CPU')
    """
    return {one.name: origin(one, arguments, environment, file) for one in all_settings()}


def origin(
    one: Setting, arguments: Mapping[str, Any], environment: Mapping[str, str], file: Mapping[str, Any] | None = None
) -> Origin:
    """Where one setting gets its value from, whatever is said of the others."""
    return _first(one, _places(arguments, environment, file)) or Origin(one.default)


def values(config: RunConfig) -> dict[str, Any]:
    """The value of every setting, by its name."""
    sections = {"launching": config.launching, "training": config.training}
    return {one.name: getattr(sections[one.section], one.name) for one in all_settings()}


def differing(config: RunConfig) -> dict[str, Any]:
    """The settings whose values are not their defaults: as arguments, they give the same configuration again."""
    found = values(config)
    return {one.name: found[one.name] for one in all_settings() if found[one.name] != one.default}


class _Place(Protocol):
    """Where a setting can be said."""

    def values(self, one: Setting) -> Iterator[Origin]:
        """What this place says of a setting, checked; the first counts."""


class _Arguments(NamedTuple):
    said: Mapping[str, Any]

    def values(self, one: Setting) -> Iterator[Origin]:
        if one.name in self.said:
            yield Origin(one.check(self.said[one.name], f"{one.name} was given as"), "the call")


class _Environment(NamedTuple):
    variables: Mapping[str, str]

    def values(self, one: Setting) -> Iterator[Origin]:
        for name in one.variables:
            if text := self.variables.get(name):
                yield Origin(one.parse(text, f"The variable {name} says"), f"the variable {name}")


class _File(NamedTuple):
    content: Mapping[str, Any]

    def values(self, one: Setting) -> Iterator[Origin]:
        for key in one.keys:
            value = self.content.get(key)
            if value is not None:
                read = one.parse if isinstance(value, str) else one.check
                yield Origin(read(value, f"{key} in the configuration file says"), "the configuration file")


def _places(
    arguments: Mapping[str, Any], environment: Mapping[str, str], file: Mapping[str, Any] | None
) -> tuple[_Place, ...]:
    """Where settings can be said, the place that wins first."""
    places: tuple[_Place, ...] = (_Arguments(said(arguments)), _Environment(environment), _File(file or {}))
    if file is None or not tpus.are_meant(file):
        return places
    cpu = _first(next(one for one in all_settings() if one.name == "cpu"), places)
    # whoever asks for the CPU wants torch's own, on whatever machine the file was written for
    return places if cpu is not None and cpu.value else (*places[:-1], _File(tpus.with_engine(file)))


def _first(one: Setting, places: tuple[_Place, ...]) -> Origin | None:
    return next((origin for place in places for origin in place.values(one)), None)


def _made(section: type[Section], places: tuple[_Place, ...]) -> Section:
    own = (one for one in all_settings() if one.section == section.__name__.lower())
    found = {one.name: _first(one, places) for one in own}
    return section(**{name: origin.value for name, origin in found.items() if origin is not None})
