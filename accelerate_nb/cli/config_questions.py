"""The questions of `accelerate-nb config`: one for each setting, in the terminal, with arrow keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from accelerate_nb.config.run_config import all_settings, changed, grouped
from accelerate_nb.config.settings import GROUPS, Setting
from accelerate_nb.config.tpu_pods import TpusConfig
from accelerate_nb.config.value_types import Boolean, NamedValues, OneOf, Text
from accelerate_nb.devices.base import AvailableDevices
from accelerate_nb.errors import AccelerateNbError, ConfigurationError
from accelerate_nb.launching.planning.preflight import PreflightReport, run_preflight

# Settings with a prompt for everybody; the others are prompted for only where the user picks their group.
FIRST = ("cpu", "num_processes", "mixed_precision", "gradient_accumulation_steps")
# Settings that follow from a launch on TPUs, and on those of a pod.
_SET_BY_TPUS = ("cpu", "engine")
_SET_BY_A_POD = (*_SET_BY_TPUS, "num_processes")
_LEFT_OPEN = "left open"
# A list gives a choice's title in place of a value that is None.
_OPEN: Any = object()


def prompt(
    current: Mapping[str, Any], devices: AvailableDevices, *, can_fork: bool, tpus: TpusConfig | None = None
) -> tuple[dict[str, Any], PreflightReport]:
    """
    The settings that a user chooses, starting from the `current` values, and a preview of a launch with them.

    `tpus` holds the TPU settings of a launch on TPUs; there is no prompt for what follows from them.

    Values that are impossible with these devices are reported, and prompted for again. Raises `KeyboardInterrupt` where the user
    leaves, and `ConfigurationError` for what no setting can mend.
    """
    known = {setting.name: setting for setting in all_settings()}
    values = dict(current)
    settled = () if tpus is None else _SET_BY_A_POD if tpus.is_pod else _SET_BY_TPUS
    for name in FIRST:
        if name not in settled:
            values[name] = _prompted(known[name], values[name], devices)
    for item in _more(settled):
        values[item.name] = _prompted(item, values[item.name], devices)
    while not (outlook := run_preflight(changed(values), devices, can_fork)).possible:
        for objection in (entry for entry in outlook.objections if entry.grave):
            if objection.name is None:
                raise ConfigurationError(objection.text)
            print(f"  {objection.text}")
            values[objection.name] = _prompted(known[objection.name], values[objection.name], devices)
    for objection in outlook.objections:
        print(f"  {objection.text}")
    return changed(values), outlook


def agrees(question: str) -> bool:
    """Whether the user confirms."""
    return bool(_chosen(question, [("yes", True), ("no", False)], True))


def is_on_tpus(*, is_usual: bool) -> bool:
    """Whether to train on TPUs."""
    choices = [("this machine: its GPUs, or its CPU", False), ("TPU: this machine's, or those of a pod", True)]
    return bool(_chosen("What does it train on?", choices, is_usual))


def of_tpus(current: TpusConfig) -> TpusConfig:
    """The TPU settings that a user enters, starting from the `current` ones."""
    function = _line(
        "The function of the script that each core calls; 'main' runs the script", current.function or "main"
    )
    one_machine = replace(current, function=None if function in {"", "main"} else function, is_pod=False)
    if not _chosen("Are they a pod, several machines of them?", [("no", False), ("yes", True)], current.is_pod):
        return one_machine
    return replace(
        one_machine,
        is_pod=True,
        name=_line("The pod's name in Google's cloud", current.name or "", lambda text: bool(text) or "It has one."),
        zone=_line("Its zone; without one, that of `gcloud config`", current.zone or "") or None,
        sudo=bool(_chosen("Should its machines use sudo?", [("no", False), ("yes", True)], current.sudo)),
        environment=tuple(
            filter(None, _line("Variables on its machines: A=1,B=2", ",".join(current.environment)).split(","))
        ),
    )


def downcasts(*, is_usual: bool) -> bool:
    """Whether bf16 on TPUs lets float64 become float32."""
    question = "With bf16, should float64 become float32, not bfloat16? [downcast_bf16]"
    return bool(_chosen(question, [("no", False), ("yes", True)], is_usual))


def _line(question: str, suggested: str, is_fine: Callable[[str], bool | str] = lambda _: True) -> str:
    import questionary

    reply: str = questionary.text(question, default=suggested, validate=is_fine).unsafe_ask()
    return reply.strip()


def _more(settled: Iterable[str]) -> Iterable[Setting]:
    """The settings of the groups that the user picks."""
    import questionary

    shown = {*FIRST, *settled}
    groups = {key: [item for item in members if item.name not in shown] for key, members in grouped().items()}
    picked = questionary.checkbox(
        "More settings? Space picks a group, Enter goes on.",
        choices=[
            questionary.Choice(f"{GROUPS[key]}: {', '.join(item.name for item in members)}", value=key)
            for key, members in groups.items()
            if members
        ],
        instruction=" ",
    ).unsafe_ask()
    return [group for key in picked for group in groups[key]]


def _prompted(setting: Setting, value: Any, devices: AvailableDevices) -> Any:
    question = f"{setting.help} [{setting.name}]"
    if isinstance(setting.value_type, (Boolean, OneOf)):
        choices: list[tuple[str, Any]] = [(_LEFT_OPEN, None)] if setting.nullable else []
        choices += [(choice, choice) for choice in setting.choices] or [("yes", True), ("no", False)]
        return _chosen(question, choices, value, setting.unsupported)
    return _written(setting, question, _suggested(setting, value, devices))


def _chosen(question: str, choices: list[tuple[str, Any]], value: Any, unsupported: Iterable[str] = ()) -> Any:
    import questionary

    listed = [questionary.Choice(title, value=_OPEN if choice is None else choice) for title, choice in choices]
    current = next((item for item, (_, entry) in zip(listed, choices, strict=True) if entry == value), None)
    not_yet = [questionary.Choice(word, disabled="not offered yet") for word in unsupported]
    reply = questionary.select(question, choices=[*listed, *not_yet], default=current, instruction=" ").unsafe_ask()
    return None if reply is _OPEN else reply


def _written(setting: Setting, question: str, suggested: str) -> Any:
    import questionary

    def is_fine(text: str) -> bool | str:
        try:
            _did_you_mean(setting, text)
        except AccelerateNbError as error:
            return str(error)
        return True

    return _did_you_mean(setting, questionary.text(question, default=suggested, validate=is_fine).unsafe_ask())


def _did_you_mean(setting: Setting, text: str) -> Any:
    """The value of a line; an empty one leaves the setting open."""
    # a text is taken as it is: a template may well end with a space
    line = text if isinstance(setting.value_type, Text) else text.strip()
    return setting.parse(line, f"{setting.name} was given as") if line else setting.default


def _suggested(setting: Setting, value: Any, devices: AvailableDevices) -> str:
    """The default text of the line."""
    # of a TPU all cores are what is meant, however many a machine has
    if value is None and setting.name == "num_processes" and devices.kind != "xla":
        return str(max(1, devices.count))
    if value is None:
        return ""
    if isinstance(setting.value_type, NamedValues):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
