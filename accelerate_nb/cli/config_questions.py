"""The questions of `accelerate-nb config`: one for each setting, in the terminal, with arrow keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from accelerate_nb.config.fields import GROUPS, Setting
from accelerate_nb.config.kinds import OneOf, Table, Text, YesNo
from accelerate_nb.config.run import all_settings, grouped
from accelerate_nb.config.tpus import Tpus
from accelerate_nb.devices.base import Devices
from accelerate_nb.errors import AccelerateNbError, ConfigurationError
from accelerate_nb.launching.preflight import Outlook, look_ahead

# What everybody is asked; all other settings only where somebody wants to be asked about their group.
FIRST = ("cpu", "num_processes", "mixed_precision", "gradient_accumulation_steps")
# What says itself where a launch is on TPUs, and on those of a pod.
_SAID_BY_TPUS = ("cpu", "engine")
_SAID_BY_A_POD = (*_SAID_BY_TPUS, "num_processes")
_LEFT_OPEN = "left open"
# A list gives a choice's title in place of a value that is None.
_OPEN: Any = object()


def ask(
    present: Mapping[str, Any], devices: Devices, *, can_fork: bool, tpus: Tpus | None = None
) -> tuple[dict[str, Any], Outlook]:
    """
    The settings that a person chooses, beginning with the `present` values, and what would become of a launch with them.

    `tpus` is what was chosen of TPUs, where a launch is to be on those; what follows from it is not asked.

    What can't be on a machine with these devices is told, and asked again. Raises `KeyboardInterrupt` where the person
    leaves, and `ConfigurationError` for what no setting can mend.
    """
    known = {one.name: one for one in all_settings()}
    values = dict(present)
    settled = () if tpus is None else _SAID_BY_A_POD if tpus.is_pod else _SAID_BY_TPUS
    for name in FIRST:
        if name not in settled:
            values[name] = _asked(known[name], values[name], devices)
    for one in _more(settled):
        values[one.name] = _asked(one, values[one.name], devices)
    while not (outlook := look_ahead(_said(values), devices, can_fork)).possible:
        for objection in (one for one in outlook.objections if one.grave):
            if objection.name is None:
                raise ConfigurationError(objection.text)
            print(f"  {objection.text}")
            values[objection.name] = _asked(known[objection.name], values[objection.name], devices)
    for objection in outlook.objections:
        print(f"  {objection.text}")
    return _said(values), outlook


def agrees(question: str) -> bool:
    """Whether the person says yes."""
    return bool(_chosen(question, [("yes", True), ("no", False)], True))


def is_on_tpus(*, is_usual: bool) -> bool:
    """Whether the person wants to train on TPUs."""
    places = [("this machine: its GPUs, or its CPU", False), ("TPU: this machine's, or those of a pod", True)]
    return bool(_chosen("What does it train on?", places, is_usual))


def of_tpus(present: Tpus) -> Tpus:
    """What a person says of TPUs, beginning with the `present` answers."""
    function = _line(
        "The function of the script that each core calls; 'main' runs the script", present.function or "main"
    )
    one_machine = replace(present, function=None if function in {"", "main"} else function, is_pod=False)
    if not _chosen("Are they a pod, several machines of them?", [("no", False), ("yes", True)], present.is_pod):
        return one_machine
    return replace(
        one_machine,
        is_pod=True,
        name=_line("The pod's name in Google's cloud", present.name or "", lambda text: bool(text) or "It has one."),
        zone=_line("Its zone; without one, that of `gcloud config`", present.zone or "") or None,
        sudo=bool(_chosen("Should its machines use sudo?", [("no", False), ("yes", True)], present.sudo)),
        environment=tuple(filter(None, _line("Variables on its machines: A=1,B=2", _joined(present)).split(","))),
    )


def downcasts(*, is_usual: bool) -> bool:
    """Whether bf16 on TPUs lets float64 become float32, as the person wants it."""
    asked = "With bf16, should float64 become float32, not bfloat16? [downcast_bf16]"
    return bool(_chosen(asked, [("no", False), ("yes", True)], is_usual))


def _joined(tpus: Tpus) -> str:
    return ",".join(tpus.environment)


def _line(question: str, suggested: str, is_fine: Callable[[str], bool | str] = lambda _: True) -> str:
    import questionary

    answer: str = questionary.text(question, default=suggested, validate=is_fine).unsafe_ask()
    return answer.strip()


def _more(settled: Iterable[str]) -> Iterable[Setting]:
    """The settings of the groups that the person picks."""
    import questionary

    asked = {*FIRST, *settled}
    groups = {key: [one for one in own if one.name not in asked] for key, own in grouped().items()}
    picked = questionary.checkbox(
        "More settings? Space picks a group, Enter goes on.",
        choices=[
            questionary.Choice(f"{GROUPS[key]}: {', '.join(one.name for one in own)}", value=key)
            for key, own in groups.items()
            if own
        ],
        instruction=" ",
    ).unsafe_ask()
    return [one for key in picked for one in groups[key]]


def _asked(one: Setting, value: Any, devices: Devices) -> Any:
    question = f"{one.help} [{one.name}]"
    if isinstance(one.kind, (YesNo, OneOf)):
        choices: list[tuple[str, Any]] = [(choice, choice) for choice in one.choices] or [("yes", True), ("no", False)]
        return _chosen(question, [*([(_LEFT_OPEN, None)] if one.nullable else []), *choices], value, one.later)
    return _written(one, question, _suggested(one, value, devices))


def _chosen(question: str, choices: list[tuple[str, Any]], value: Any, later: Iterable[str] = ()) -> Any:
    import questionary

    listed = [questionary.Choice(title, value=_OPEN if each is None else each) for title, each in choices]
    present = next((each for each, (_, one) in zip(listed, choices, strict=True) if one == value), None)
    not_yet = [questionary.Choice(word, disabled="not offered yet") for word in later]
    answer = questionary.select(question, choices=[*listed, *not_yet], default=present, instruction=" ").unsafe_ask()
    return None if answer is _OPEN else answer


def _written(one: Setting, question: str, suggested: str) -> Any:
    import questionary

    def is_fine(text: str) -> bool | str:
        try:
            _meant(one, text)
        except AccelerateNbError as error:
            return str(error)
        return True

    return _meant(one, questionary.text(question, default=suggested, validate=is_fine).unsafe_ask())


def _meant(one: Setting, text: str) -> Any:
    """The value that a line stands for; an empty one leaves the setting open."""
    # a text is taken as it is: a template may well end with a space
    line = text if isinstance(one.kind, Text) else text.strip()
    return one.parse(line, f"{one.name} was given as") if line else one.default


def _suggested(one: Setting, value: Any, devices: Devices) -> str:
    """What stands in the line already."""
    # of a TPU all cores are what is meant, however many a machine has
    if value is None and one.name == "num_processes" and devices.kind != "xla":
        return str(max(1, devices.count))
    if value is None:
        return ""
    if isinstance(one.kind, Table):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    return {one.name: values[one.name] for one in all_settings() if values[one.name] != one.default}
