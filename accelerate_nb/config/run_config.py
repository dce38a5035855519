"""The whole configuration, resolved from a call's arguments, the environment and a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeVar

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
    """The configuration: an argument wins over an environment variable, that over the file, that over the default."""
    # An argument that is `None`, or a default marked by `unset`, was not given. `NotYetError` is for a feature that is
    # not offered yet, also one that the file requests.
    arguments = with_current_names(arguments, all_settings())
    known = {setting.name for setting in all_settings()}
    for name in arguments:
        if name not in known:
            raise unknown_setting(name, known)
    former = {name for setting in all_settings() for name in setting.deprecated}
    names = {*(name.upper() for name in known | former), *NO_SETTINGS}
    for variable in (name for name, text in environment.items() if text and name.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX)
        # one that is not near to any may be another release's
        if name not in names and (suggestion := did_you_mean(name, sorted(names), prefix=PREFIX)):
            raise UnknownSettingError(f"The variable {variable} is set, and no setting has that name. {suggestion}")
    refuse_unsupported(file or {})
    sources = _sources(arguments, environment, file)
    return RunConfig(launching=sources.made(LaunchingConfig), training=sources.made(TrainingConfig))


@dataclass(frozen=True, slots=True)
class Origin:
    """The value of a setting and its source: `source` is a text for people, and empty for a default."""

    value: Any
    source: str = ""


def origins(
    arguments: Mapping[str, Any], environment: Mapping[str, str], file: Mapping[str, Any] | None = None
) -> dict[str, Origin]:
    """The source of each setting's value, by the same rules as in `resolve`, which raises for an invalid value."""
    return {setting.name: origin(setting, arguments, environment, file) for setting in all_settings()}


def origin(
    setting: Setting,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Mapping[str, Any] | None = None,
) -> Origin:
    """The source of one setting's value, whatever the others are."""
    return _sources(arguments, environment, file).first(setting) or Origin(setting.default)


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


class _Sources(NamedTuple):
    """Where settings get their values from, the source that wins first."""

    arguments: Mapping[str, Any]
    variables: Mapping[str, str]
    file: Mapping[str, Any]

    def first(self, setting: Setting) -> Origin | None:
        """The value of a setting that counts, checked; `None` where no source has one."""
        if setting.name in self.arguments:
            return Origin(setting.check(self.arguments[setting.name], f"{setting.name} was given as"), "the call")
        for name in setting.variables:
            if text := self.variables.get(name):
                if name.removeprefix(PREFIX).lower() in setting.deprecated:
                    warn_deprecated(name, setting.variables[0])
                return Origin(setting.parse(text, f"The variable {name} is"), f"the variable {name}")
        for key in setting.keys:
            if (value := self.file.get(key)) is not None:
                if key in setting.deprecated:
                    warn_deprecated(f"{key} in the configuration file", setting.name)
                read = setting.parse if isinstance(value, str) else setting.check
                return Origin(read(value, f"{key} in the configuration file is"), "the configuration file")
        return None

    def made(self, section: type[Section]) -> Section:
        """The settings of a section; a range of nodes (`"1:2"`) is two of them."""
        members = (setting for setting in all_settings() if setting.section == section_name(section))
        found = {item.name: origin.value for item in members if (origin := self.first(item)) is not None}
        if isinstance(nodes := found.get("num_nodes"), str):
            if "min_nodes" in found:
                raise ConfigurationError(
                    f"num_nodes={nodes!r} and min_nodes={found['min_nodes']} were both given. Pass one of them."
                )
            found["min_nodes"], found["num_nodes"] = map(int, nodes.split(":"))
        return section(**found)


def _sources(arguments: Mapping[str, Any], environment: Mapping[str, str], file: Mapping[str, Any] | None) -> _Sources:
    for strategy in STRATEGIES if file is not None else ():
        file = strategy.with_strategy(file or {})
    sources = _Sources(given_arguments(arguments), environment, file or {})
    if file is None or not hf_keys.file_is_for_tpus(file):
        return sources
    cpu = sources.first(setting_named("cpu"))
    # a request for the CPU means torch's own, on whatever machine the file was written for
    return sources if cpu is not None and cpu.value else sources._replace(file=hf_keys.with_engine(file))
