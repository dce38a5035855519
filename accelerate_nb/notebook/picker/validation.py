"""Validation of the settings in a form: a configuration in every spelling, or the errors of the settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate_nb.config import formats, hf_files
from accelerate_nb.config.hf_keys import refuse_unsupported
from accelerate_nb.config.magic_args import cell_flags
from accelerate_nb.config.options import parallelism
from accelerate_nb.config.run_config import Origin, RunConfig, all_settings, origin
from accelerate_nb.config.value_types import Text
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.launching.planning.placement import Placement, accelerates_word
from accelerate_nb.launching.planning.preflight import run_preflight


@dataclass(frozen=True, slots=True)
class InitialSettings:
    """The settings of the environment and the configuration file; `trouble` lists what can't be read."""

    origins: Mapping[str, Origin]
    file: str | None
    trouble: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are set somewhere, with their values."""
        return {name: item.value for name, item in self.origins.items() if item.source}


def begin(environment: Mapping[str, str], config_file: str | None = None) -> InitialSettings:
    """The initial settings; a broken file or variable is reported, and the rest counts."""
    trouble: list[str] = []
    path, content = None, {}
    try:
        path = hf_files.find(environment, config_file)
        content = {} if path is None else hf_files.read(path)
        refuse_unsupported(content, f"The configuration file {path}")
    except AccelerateNbError as error:
        trouble.append(str(error))
    origins = {}
    for setting in all_settings():
        try:
            origins[setting.name] = origin(setting, {}, environment, content)
        except AccelerateNbError as error:
            trouble.append(str(error))
            origins[setting.name] = Origin(setting.default)
    return InitialSettings(origins, None if path is None else str(path), tuple(trouble))


@dataclass(frozen=True, slots=True)
class FormValidation:
    """The result of the form at one moment; `config` is `None` where a launch would fail, and `general` names no setting."""

    config: RunConfig | None
    choice: Placement | None = None
    wrong: Mapping[str, str] = field(default_factory=dict)
    advice: Mapping[str, str] = field(default_factory=dict)
    general: tuple[str, ...] = ()
    call: str = ""
    magic: str = ""
    command: str = ""
    content: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def mesh(self) -> Mapping[str, int]:
        """The degrees of the mesh that a launch makes, by axes from the outermost to the innermost."""
        return {} if self.config is None else parallelism.sizes(self.config.training.parallelism_config or {})

    @property
    def file(self) -> str:
        """The text of the configuration file."""
        return formats.text(self.content)


def appraise(
    typed: Mapping[str, Any], devices: AvailableDevices, elsewhere: Mapping[str, Any], *, can_fork: bool = True
) -> FormValidation:
    """The result of `typed` on a machine with these devices; an empty text leaves its setting open, or as it is set `elsewhere`."""
    settings, wrong = _read(typed)
    if wrong:
        return FormValidation(None, wrong=wrong)
    outlook = run_preflight(settings, devices, can_fork)
    by_name = {objection.name: objection.text for objection in outlook.objections if objection.name is not None}
    nameless = tuple(objection.text for objection in outlook.objections if objection.name is None)
    if outlook.config is None or outlook.choice is None or not outlook.possible:
        return FormValidation(None, wrong=by_name, general=nameless)
    config, choice = outlook.config, outlook.choice
    explicit_settings = formats.explicit_settings(config, elsewhere)
    content = formats.keys(config, accelerates_word(choice, devices))
    in_a_cell = {cell_flag.name for cell_flag in cell_flags()}
    notes = {}
    if left_open := formats.inexpressible(config, elsewhere):
        notes["call"] = (
            f"{_and(left_open)} left open here, but set by the environment or the file, which no argument takes back. "
            "notebook_launcher(train, config=picker.value) does."
        )
    if beyond := [name for name in explicit_settings if name not in in_a_cell]:
        notes["magic"] = f"{_and(beyond)} of no meaning to cells, which run in workers that stay."
    if extensions := formats.extension_keys(content):
        notes["file"] = (
            f"{_and(extensions)} in comments, which accelerate_nb alone reads; Hugging Face's own `accelerate launch` takes the rest."
        )
    return FormValidation(
        config,
        choice,
        advice=by_name,
        general=nameless,
        call=formats.call(explicit_settings),
        magic=formats.magic({name: value for name, value in explicit_settings.items() if name in in_a_cell}),
        command=formats.command(explicit_settings),
        content=content,
        notes=notes,
    )


def _read(typed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    given: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for setting in all_settings():
        text = typed.get(setting.name)
        # a text is taken as it is: a template may well end with a space
        text = text.strip() if isinstance(text, str) and not isinstance(setting.value_type, Text) else text
        if text is None or text == "":
            continue
        where = f"{setting.name} was given as"
        try:
            value = setting.parse(text, where) if isinstance(text, str) else setting.check(text, where)
        except AccelerateNbError as error:
            # the setting's help stands beside its control
            wrong[setting.name] = str(error).removesuffix(f" ({setting.help})")
            continue
        if value is not None and value != setting.default:
            given[setting.name] = value
    return given, wrong


def _and(names: tuple[str, ...] | list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are"
