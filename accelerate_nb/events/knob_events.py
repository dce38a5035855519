"""The events of knobs: numbers of a training that a person changes while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnobValue:
    """The value of a rank's knob from a step on, which was declared or changed; `least` and `most` are its bounds, where it has any."""

    rank: int
    name: str
    value: float
    step: int
    least: float | None
    most: float | None
    time: float
    changed: bool = False


@dataclass(frozen=True, slots=True)
class KnobHeld:
    """A rank waits at the end of its step to change a knob, by the change's number; `steps` it has made, `None` where it makes none."""

    rank: int
    number: int
    steps: int | None
