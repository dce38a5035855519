"""The messages of a run host that starts, to the process that started it."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate_nb.transport.protocol.message import Message


@dataclass(frozen=True, slots=True)
class HostNotice(Message):
    """Show a text on standard error."""

    text: str


@dataclass(frozen=True, slots=True)
class HostReady(Message):
    """Processes can attach to the run, which begins."""


@dataclass(frozen=True, slots=True)
class HostFailed(Message):
    """There is no run, for an error of this package, by the name of its class."""

    error_kind: str
    error: str
