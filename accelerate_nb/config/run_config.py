"""The whole configuration, resolved from a call's arguments, the environment and a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

from accelerate_nb.config import hf_keys
from accelerate_nb.config.environment import NO_SETTINGS, PREFIX
from accelerate_nb.config.hf_keys import refuse_unsupported
from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.settings import (
    GROUPS,
    Setting,
    given_arguments,
    section_name,
    settings,
    unknown_setting,
    warn_deprecated,
    with_current_names,
)
from accelerate_nb.config.training import STRATEGIES, TrainingConfig
from accelerate_nb.config.value_types import did_you_mean
from accelerate_nb.errors import ConfigurationError, UnknownSettingError

Section = TypeVar("Section", LaunchingConfig, TrainingConfig)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run."""

    launching: LaunchingConfig = field(default_factory=LaunchingConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def environ(self) -> dict[str, str]:
        """The variables that every worker gets for it."""
        return {**self.launching.environ(), **self.training.environ()}


@cache
def all_settings() -> tuple[Setting, ...]:
    """Every setting there is."""
    return (*settings(LaunchingConfig), *settings(TrainingConfig))


def setting_named(name: str) -> Setting:
    """The setting of this name; `StopIteration` where there is none."""
    return next(setting for setting in all_settings() if setting.name == name)


@cache
def grouped() -> dict[str, tuple[Setting, ...]]:
    """Every setting under the key of its heading in `GROUPS`, in the order in which a form or a help shows them."""
    return {
        key: members
        for key in GROUPS
        if (members := tuple(setting for setting in all_settings() if setting.group == key))
    }


def resolve(
    arguments: Mapping[str, Any], environment: Mapping[str, str], file: Mapping[str, Any] | None = None
) -> RunConfig:
    """
    The configuration of a run: an argument wins over an environment variable, that over the file, that over the default.

    An argument that is `None`, or a default marked by `unset`, was not given. `ConfigurationError` names an invalid
    value or an unknown argument; `NotYetError` a feature that is not offered yet, also one that the file requests.

    >>> resolve({"num_processes": 2}, {"ACCELERATE_MIXED_PRECISION": "bf16"}).training.mixed_precision
    'bf16'
    """
    arguments = with_current_names(arguments, all_settings())
    known = {setting.name for setting in all_settings()}
    for name in arguments:
        if name not in known:
            raise unknown_setting(name, known)
    _refuse_misspelled(environment, {*known, *(former for setting in all_settings() for former in setting.deprecated)})
    refuse_unsupported(file or {})
    sources = _sources(arguments, environment, file)
    return RunConfig(launching=_made(LaunchingConfig, sources), training=_made(TrainingConfig, sources))


def _refuse_misspelled(environment: Mapping[str, str], known: Iterable[str]) -> None:
    """Raise for a variable that is nearly one of a setting; others with this package's prefix may be another release's."""
    names = {*(name.upper() for name in known), *NO_SETTINGS}
    for variable, text in environment.items():
        name = variable.removeprefix(PREFIX)
        if (
            text
            and name != variable
            and name not in names
            and (suggestion := did_you_mean(name, sorted(names), prefix=PREFIX))
        ):
            raise UnknownSettingError(f"The variable {variable} is set, and no setting has that name. {suggestion}")


@dataclass(frozen=True, slots=True)
class Origin:
    """The value of a setting and its source: `source` is a text for people, and empty for a default."""

    value: Any
    source: str = ""


def origins(
    arguments: Mapping[str, Any], environment: Mapping[str, str], file: Mapping[str, Any] | None = None
) -> dict[str, Origin]:
    """
    The source of each setting's value, by the same rules as in `resolve`, which raises for an invalid value.

    >>> origins({}, {"ACCELERATE_USE_CPU": "1"})["cpu"]
    Origin(value=True, source='the variable ACCELERATE_USE_CPU')
    """
    return {setting.name: origin(setting, arguments, environment, file) for setting in all_settings()}


def origin(
    setting: Setting,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Mapping[str, Any] | None = None,
) -> Origin:
    """The source of one setting's value, whatever the others are."""
    return _first(setting, _sources(arguments, environment, file)) or Origin(setting.default)


def values(config: RunConfig) -> dict[str, Any]:
    """The value of every setting, by its name."""
    sections = {"launching": config.launching, "training": config.training}
    return {setting.name: getattr(sections[setting.section], setting.name) for setting in all_settings()}


def differing(config: RunConfig) -> dict[str, Any]:
    """The settings whose values are not their defaults: as arguments, they give the same configuration again."""
    return changed(values(config))


def changed(found: Mapping[str, Any]) -> dict[str, Any]:
    """The values of settings, of which all are given, that are not their defaults."""
    return {setting.name: found[setting.name] for setting in all_settings() if found[setting.name] != setting.default}


class _ArgumentSource(NamedTuple):
    arguments: Mapping[str, Any]

    def values(self, setting: Setting) -> Iterator[Origin]:
        if setting.name in self.arguments:
            yield Origin(setting.check(self.arguments[setting.name], f"{setting.name} was given as"), "the call")


class _EnvironmentSource(NamedTuple):
    variables: Mapping[str, str]

    def values(self, setting: Setting) -> Iterator[Origin]:
        for name in setting.variables:
            if text := self.variables.get(name):
                if name.removeprefix(PREFIX).lower() in setting.deprecated:
                    warn_deprecated(name, setting.variables[0])
                yield Origin(setting.parse(text, f"The variable {name} is"), f"the variable {name}")


class _FileSource(NamedTuple):
    content: Mapping[str, Any]

    def values(self, setting: Setting) -> Iterator[Origin]:
        for key in setting.keys:
            value = self.content.get(key)
            if value is not None:
                if key in setting.deprecated:
                    warn_deprecated(f"{key} in the configuration file", setting.name)
                read = setting.parse if isinstance(value, str) else setting.check
                yield Origin(read(value, f"{key} in the configuration file is"), "the configuration file")


# A source of settings' values: those that it has for a setting, checked; the first counts.
_SettingSource: TypeAlias = _ArgumentSource | _EnvironmentSource | _FileSource


def _sources(
    arguments: Mapping[str, Any], environment: Mapping[str, str], file: Mapping[str, Any] | None
) -> tuple[_SettingSource, ...]:
    """The sources of settings, the one that wins first."""
    for strategy in STRATEGIES if file is not None else ():
        file = strategy.with_strategy(file or {})
    sources: tuple[_SettingSource, ...] = (
        _ArgumentSource(given_arguments(arguments)),
        _EnvironmentSource(environment),
        _FileSource(file or {}),
    )
    if file is None or not hf_keys.file_is_for_tpus(file):
        return sources
    cpu = _first(setting_named("cpu"), sources)
    # a request for the CPU means torch's own, on whatever machine the file was written for
    return sources if cpu is not None and cpu.value else (*sources[:-1], _FileSource(hf_keys.with_engine(file)))


def _first(setting: Setting, sources: tuple[_SettingSource, ...]) -> Origin | None:
    return next((origin for source in sources for origin in source.values(setting)), None)


def _made(section: type[Section], sources: tuple[_SettingSource, ...]) -> Section:
    members = (setting for setting in all_settings() if setting.section == section_name(section))
    found = {item.name: _first(item, sources) for item in members}
    return section(**_with_min_nodes({name: origin.value for name, origin in found.items() if origin is not None}))


def _with_min_nodes(found: dict[str, Any]) -> dict[str, Any]:
    """The values of settings, with a range of nodes (`"1:2"`) as its two settings."""
    if not isinstance(nodes := found.get("num_nodes"), str):
        return found
    if "min_nodes" in found:
        raise ConfigurationError(
            f"num_nodes={nodes!r} and min_nodes={found['min_nodes']} were both given. Pass one of them."
        )
    least, most = map(int, nodes.split(":"))
    return {**found, "num_nodes": most, "min_nodes": least}
