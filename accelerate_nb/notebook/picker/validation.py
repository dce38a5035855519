"""What the settings in a form amount to: a configuration in every spelling, or what is wrong with which setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate_nb.config import files, later, spelling
from accelerate_nb.config.cells import cell_flags
from accelerate_nb.config.fields import Setting
from accelerate_nb.config.kinds import Text
from accelerate_nb.config.run import Origin, RunConfig, all_settings, origin, resolve
from accelerate_nb.devices.base import Devices
from accelerate_nb.errors import AccelerateNbError, NotYetError
from accelerate_nb.launching.choosing import Choice, accelerates_word
from accelerate_nb.launching.preflight import Objection, look_ahead


@dataclass(frozen=True, slots=True)
class Beginning:
    """What the environment and the configuration file say before anybody has typed; `trouble` is what can't be read."""

    origins: Mapping[str, Origin]
    file: str | None
    trouble: tuple[str, ...]

    @property
    def said(self) -> dict[str, Any]:
        """The settings that are said somewhere, with their values."""
        return {name: one.value for name, one in self.origins.items() if one.place}


def begin(environment: Mapping[str, str], config_file: str | None = None) -> Beginning:
    """What is said already; a broken file or variable is told, and the rest counts."""
    trouble: list[str] = []
    path, content = None, {}
    try:
        path = files.find(environment, config_file)
        content = {} if path is None else files.read(path)
        later.refuse(content, f"The configuration file {path}")
    except AccelerateNbError as error:
        trouble.append(str(error))
    origins = {}
    for one in all_settings():
        try:
            origins[one.name] = origin(one, {}, environment, content)
        except AccelerateNbError as error:
            trouble.append(str(error))
            origins[one.name] = Origin(one.default)
    return Beginning(origins, None if path is None else str(path), tuple(trouble))


@dataclass(frozen=True, slots=True)
class Appraisal:
    """
    What the form amounts to at one moment.

    `config` is `None` where a launch would fail; `wrong` and `advice` stand beside the settings that they name, `general`
    beside none.
    """

    config: RunConfig | None
    choice: Choice | None = None
    wrong: Mapping[str, str] = field(default_factory=dict)
    advice: Mapping[str, str] = field(default_factory=dict)
    general: tuple[str, ...] = ()
    call: str = ""
    magic: str = ""
    command: str = ""
    content: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The text of the configuration file."""
        return spelling.text(self.content)


def appraise(
    typed: Mapping[str, Any], devices: Devices, elsewhere: Mapping[str, Any], *, can_fork: bool = True
) -> Appraisal:
    """
    What `typed` amounts to on a machine with these devices; pure, and raises nothing.

    Texts are read as the settings read them, an empty one leaves its setting open. `elsewhere` is what the environment and
    the file say.
    """
    said, wrong = _read(typed)
    if wrong:
        return Appraisal(None, wrong=wrong)
    outlook = look_ahead(said, devices, can_fork)
    if outlook.config is None or outlook.choice is None or not outlook.possible:
        return Appraisal(None, wrong=_by_name(outlook.objections), general=_nameless(outlook.objections))
    config, choice = outlook.config, outlook.choice
    to_say = spelling.to_say(config, elsewhere)
    content = spelling.keys(config, accelerates_word(choice, devices))
    in_a_cell = {one.name for one in cell_flags()}
    return Appraisal(
        config,
        choice,
        advice=_by_name(outlook.objections),
        general=_nameless(outlook.objections),
        call=spelling.call(to_say),
        magic=spelling.magic({name: value for name, value in to_say.items() if name in in_a_cell}),
        command=spelling.command(to_say),
        content=content,
        notes=_notes(config, to_say, content, elsewhere, in_a_cell),
    )


def several_machines() -> str:
    """What stands in the way of several machines; empty where nothing does."""
    try:
        resolve({"num_nodes": 2}, {})
    except NotYetError:
        return "Only one machine is offered here yet."
    return ""


def value_of(one: Setting, typed: Any) -> Any:
    """What a control of the form says of a setting: `None` is nothing."""
    # a text is taken as it is: a template may well end with a space
    text = typed.strip() if isinstance(typed, str) and not isinstance(one.kind, Text) else typed
    if text is None or text == "":
        return None
    where = f"{one.name} was given as"
    return one.parse(text, where) if isinstance(text, str) else one.check(text, where)


def _read(typed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    said: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for one in all_settings():
        try:
            value = value_of(one, typed.get(one.name))
        except AccelerateNbError as error:
            wrong[one.name] = str(error)
            continue
        if value is not None and value != one.default:
            said[one.name] = value
    return said, wrong


def _by_name(objections: tuple[Objection, ...]) -> dict[str, str]:
    return {one.name: one.text for one in objections if one.name is not None}


def _nameless(objections: tuple[Objection, ...]) -> tuple[str, ...]:
    return tuple(one.text for one in objections if one.name is None)


def _notes(
    config: RunConfig,
    to_say: Mapping[str, Any],
    content: Mapping[str, Any],
    elsewhere: Mapping[str, Any],
    in_a_cell: set[str],
) -> dict[str, str]:
    """What one should know of a spelling, by the spelling's name."""
    notes = {}
    if open_here := spelling.unsayable(config, elsewhere):
        notes["call"] = (
            f"{_and(open_here)} left open here, but said by the environment or the file, which no argument takes back. "
            "notebook_launcher(train, config=picker.value) does."
        )
    if beyond := [name for name in to_say if name not in in_a_cell]:
        notes["magic"] = f"{_and(beyond)} of no meaning to cells, which run in workers that stay."
    if own := spelling.own_keys(content):
        notes["file"] = (
            f"{_and(own)} in comments, which accelerate_nb alone reads; Hugging Face's own `accelerate launch` takes the rest."
        )
    return notes


def _and(names: tuple[str, ...] | list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are"
