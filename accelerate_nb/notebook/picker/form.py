"""The picker: a form in which a configuration is chosen, checked, copied, kept and tried; and the validation of what is typed there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets

from accelerate_nb.config import formats, hf_files
from accelerate_nb.config.hf_keys import refuse_unsupported
from accelerate_nb.config.magic_args import cell_flags
from accelerate_nb.config.options import parallelism
from accelerate_nb.config.run_config import Origin, RunConfig, all_settings, origin
from accelerate_nb.config.settings import Setting, unknown_setting
from accelerate_nb.config.value_types import Text
from accelerate_nb.devices.nvml import GpuGauge
from accelerate_nb.devices.probe import AvailableDevices, probe
from accelerate_nb.devices.usage import HostGauge
from accelerate_nb.errors import AccelerateNbError, ConfigurationError
from accelerate_nb.events.event_types import CheckResult
from accelerate_nb.launching.planning.placement import Placement, accelerates_word
from accelerate_nb.launching.planning.preflight import run_preflight
from accelerate_nb.notebook.picker import html, sections

_SPELLINGS = {
    "call": "Cell",
    "magic": "First line of a cell on every rank",
    "command": "Command line",
    "file": "Configuration file",
}
_IMPORT = "from accelerate_nb import notebook_launcher"
_NOT_YET = "Correct what is marked first."


def config_picker(config_file: str | Path | None = None, **settings: Any) -> ConfigPicker:
    """
    A form for the configuration of a run: its `value` is what a launcher takes.

    It starts from the environment and the configuration file (`config_file` names another one, `""` none), and
    with `settings`, by name. An error for this machine is shown next to its field while one types; the equivalent
    cell, command line and file are there to copy; the file can be saved; a press tests the settings with real workers.

    Raises `ConfigurationError` for an unknown setting, and for a value that can't be one.

    >>> picker = config_picker(num_processes=2)
    >>> picker                      # the form, as the last line of a cell
    >>> notebook_launcher(train, config=picker.value)
    """
    return ConfigPicker(None if config_file is None else str(config_file), settings)


class ConfigPicker:
    """The form; `config_picker(...)` gives one."""

    def __init__(self, config_file: str | None, settings: Mapping[str, Any]) -> None:
        self._devices = probe()
        self._beginning = initial_settings(os.environ, config_file)
        self._appraisal = FormValidation(None)
        self._is_filling = False
        self._fields = {setting.name: sections.SettingField(setting) for setting in all_settings()}
        self.settings = sections.SettingsSection(self._fields)
        self.insert = sections.InsertCellButton()
        self._general, self._leads, self._mesh = (ipywidgets.HTML() for _ in range(3))
        self._texts = {name: ipywidgets.HTML() for name in _SPELLINGS}
        path = self._beginning.file or str(hf_files.default_path(os.environ))
        self.file = sections.FileSection(lambda: self._appraisal.content, self.load, path)
        self.test = sections.TestSection(lambda: self.value)
        self._again = ipywidgets.Button(description="Reset", tooltip="Back to the environment and the file")
        self._again.on_click(lambda _: self.reset())
        heading = ipywidgets.HTML(html.heading("Copy as"))
        call, *others = self._texts.values()
        texts = ipywidgets.VBox([heading, self._leads, self._mesh, call, self.insert, *others]).add_class("acc-group")
        right = ipywidgets.VBox([texts, self.file.box, self.test.box]).add_class("acc-side")
        halves = ipywidgets.Box([self.settings.box, right]).add_class("acc-halves")
        again = ipywidgets.Box([self._again]).add_class("acc-row")
        gpus = GpuGauge(os.environ).memory_sizes() if self._devices.kind == "cuda" else []
        title = ipywidgets.HTML(html.title(self._devices, HostGauge([]).memory()[1], gpus))
        parts = [ipywidgets.HTML(html.style()), title, self._general, halves, again]
        self.form = ipywidgets.VBox(parts).add_class("acc-picker")
        self._begin_from(self._beginning)
        self.set(**settings)
        for item in self._fields.values():
            item.control.observe(partial(self._typed, item.setting), names="value")

    @property
    def value(self) -> RunConfig:
        """
        The configuration that the form shows, as a launcher takes it.

        Raises `ConfigurationError` where a launch with it would fail, with all that has to be corrected.
        """
        if self._appraisal.config is None:
            wrong = [*self._appraisal.wrong.values(), *self._appraisal.general]
            raise ConfigurationError("The form shows settings that can't be launched with:\n" + "\n".join(wrong))
        return self._appraisal.config

    @property
    def checks(self) -> list[CheckResult]:
        """The results of the latest self-test."""
        return self.test.checks

    def set(self, **settings: Any) -> None:
        """
        Put values into the form; `None` leaves a setting open.

        Raises `ConfigurationError` for an unknown setting, and for a value that can't be one; then nothing changes.
        """
        checked = {name: self._checked(name, value) for name, value in settings.items()}
        self._show(checked)
        self._marks.update(dict.fromkeys(checked, "by you"))
        self._appraise()

    def reset(self) -> None:
        """Reset to the current environment and configuration file."""
        self._begin_from(initial_settings(os.environ, self._beginning.file))

    def load(self, path: str) -> None:
        """Show the settings of the environment and of this file; raises `ConfigurationError` where the file can't be read."""
        hf_files.read(Path(path))
        self._begin_from(initial_settings(os.environ, path))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.form.model_id}
        return {"text/plain": repr(self), "application/vnd.jupyter.widget-view+json": view}

    def __repr__(self) -> str:
        return f"<ConfigPicker: {self._appraisal.call or _NOT_YET}>"

    # ------------------------------------------------------------------------------------------------------ inside

    def _checked(self, name: str, value: Any) -> Any:
        if name not in self._fields:
            raise unknown_setting(name, self._fields)
        item = self._fields[name].setting
        return item.default if value is None else item.check(value, f"{name} was given as")

    def _begin_from(self, beginning: InitialSettings) -> None:
        self._beginning = beginning
        file = f"from {beginning.file}" if beginning.file else "from the configuration file"
        names = {"": "", "the configuration file": file}
        sources = {name: origin.source for name, origin in beginning.origins.items()}
        self._marks = {name: names.get(source, f"from {source}") for name, source in sources.items()}
        self._show({name: origin.value for name, origin in beginning.origins.items()})
        self._appraise()

    def _show(self, values: Mapping[str, Any]) -> None:
        """Put values into controls, as one change."""
        self._is_filling = True
        try:
            for name, value in values.items():
                self._fields[name].show(value)
        finally:
            self._is_filling = False

    def _typed(self, setting: Setting, _change: Any) -> None:
        if not self._is_filling:
            self._marks[setting.name] = "by you"
            self._appraise()

    def _appraise(self) -> None:
        """Update all remarks of the form."""
        typed = {name: item.control.value for name, item in self._fields.items()}
        self._appraisal = found = appraise(typed, self._devices, self._beginning.settings, can_fork=hasattr(os, "fork"))
        for name, item in self._fields.items():
            item.remark(found.wrong.get(name), found.advice.get(name))
            is_set_elsewhere = self._beginning.origins[name].source
            item.mark("default" if item.is_default and not is_set_elsewhere else self._marks[name])
        self.settings.show_wrong(found.wrong)
        general = dict.fromkeys([*self._beginning.trouble, *found.general])
        self._general.value = "".join(html.remark(text, grave=True) for text in general)
        self.insert.code = f"{_IMPORT}\n\n{found.call}" if found.call else ""
        for name, label in _SPELLINGS.items():
            self._texts[name].value = html.to_copy(label, getattr(found, name), found.notes.get(name, ""))
        self._leads.value = html.leads_to(found.choice.why if found.choice is not None else "", _NOT_YET)
        self._mesh.value = html.mesh(found.mesh)
        self.file.allow(possible=found.config is not None)
        self.test.allow(possible=found.config is not None)


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


def initial_settings(environment: Mapping[str, str], config_file: str | None = None) -> InitialSettings:
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
    settings, wrong = _given(typed)
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


def _given(typed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
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
