"""The messages that request a profile of a run's steps."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate_nb.transport.protocol.message import Message


@dataclass(frozen=True, slots=True)
class ProfileSteps(Message):
    """Kernel to worker: profile the next steps, and send the event `StepProfile` of this number; `folder` is that of the run."""

    rank: int
    number: int
    steps: int
    folder: str


@dataclass(frozen=True, slots=True)
class RequestProfile(Message):
    """Attached process to run host: profile the next steps of these ranks; the reply is a `LiveState`."""

    steps: int
    ranks: tuple[int, ...]
