"""The messages that change a knob of a run."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate_nb.transport.protocol.message import Message


@dataclass(frozen=True, slots=True)
class HoldForKnob(Message):
    """Kernel to worker: wait at the end of the step for a change of a knob, and send the event `KnobHeld`."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class ChangeKnobAfter(Message):
    """Kernel to worker: change a knob after so many steps; with `None`, go on without the change."""

    number: int
    name: str
    value: float
    after: int | None


@dataclass(frozen=True, slots=True)
class ChangeKnob(Message):
    """Attached process to run host: change a knob of the run; the reply is a `LiveState`."""

    name: str
    value: float
