"""The interface of an engine, which places a run's workers and knows nothing of what they do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from accelerate_nb.transport.worker_spec import LocalWorker


class Workers(Protocol):
    """Processes that an engine started, each with one rank, or with several as threads. No method waits."""

    def exit_descriptors(self) -> Sequence[int]:
        """Descriptors that become readable when there is news."""

    def news(self) -> None:
        """Take in what has happened."""

    def exit_codes(self) -> Mapping[int, int]:
        """The ranks whose processes have ended, with their exit codes; negative: the signal that ended it."""

    def signal(self, number: int, ranks: Collection[int]) -> None:
        """Send a signal, once, to every process that still runs and has one of these ranks."""

    def kill(self) -> None:
        """SIGKILL for every worker and all that it started."""

    def lost(self) -> str | None:
        """The reason why the workers can't be observed any more, or `None`; raises a `LaunchError` where none can be started."""

    def close(self) -> None:
        """Give back what this process holds of them; they have ended."""


class Engine(Protocol):
    """A way to place workers on this machine."""

    def start(self, processes: Sequence[Sequence[LocalWorker]]) -> Workers:
        """Start one process for each sequence of workers, which are its ranks; returns before they run."""
