"""What an engine is: it places a run's workers, and knows nothing of what they do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from accelerate_nb.launching.order import Order


class Workers(Protocol):
    """Processes that were placed, each with one rank, or with several as threads. Nothing here waits."""

    def watched(self) -> Sequence[int]:
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
        """Why nothing more can be heard of the workers, where that is so."""

    def close(self) -> None:
        """Give back what this process holds of them; they have ended."""


class Placing(Protocol):
    """A way to place workers on this machine."""

    def start(self, orders: Sequence[Sequence[Order]]) -> Workers:
        """Start one process for each sequence of orders, those of its ranks; gives them before they run."""
