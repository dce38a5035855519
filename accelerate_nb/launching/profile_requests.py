"""The kernel's side of profiles: which ranks profile their next steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from accelerate_nb.config.rank_lists import of_ranks
from accelerate_nb.errors import ConfigurationError, StateError
from accelerate_nb.events.model import (
    Event,
    ProfileRequested,
)
from accelerate_nb.events.run_state import RunState
from accelerate_nb.transport.messages import (
    Message,
    ProfileSteps,
)

_MOST_STEPS = 100


class ProfileRequests:
    """Requests profiles of a run's ranks, one after the other; `send` reaches a rank's inbox, and `take` keeps an event of the run."""

    def __init__(
        self, view: RunState, folder: Path, send: Callable[[int, Message], None], take: Callable[[Event], None]
    ) -> None:
        self._view, self._folder, self._send, self._take = view, folder, send, take
        self._lock = threading.Lock()
        self._count = 0

    def request(self, steps: int, ranks: Iterable[int] | None) -> None:
        """Have ranks profile their next steps, from any thread; raises what `checked_ranks` does."""
        with self._lock:
            chosen = checked_ranks(self._view, steps, ranks)
            self._count += 1
            for rank in chosen:
                self._take(ProfileRequested(rank, self._count, steps, time.time()))
        for rank in chosen:
            self._send(rank, ProfileSteps(rank, self._count, steps, str(self._folder)))


def checked_ranks(view: RunState, steps: object, ranks: Iterable[int] | None) -> tuple[int, ...]:
    """
    The ranks of a run that are to profile so many steps, with `None` all that run.

    Raises `ConfigurationError` for steps or ranks that there are not, and `StateError` where they don't run, or profile already.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= _MOST_STEPS:
        raise ConfigurationError(f"A profile of {steps!r} steps was requested. Profile 1 to {_MOST_STEPS} steps.")
    known = {summary.rank: summary for summary in view.glances()}
    running = [rank for rank, summary in known.items() if summary.state == "running"]
    chosen = running if ranks is None else sorted(set(ranks))
    if unknown := [rank for rank in chosen if rank not in known]:
        raise ConfigurationError(
            f"A profile of {of_ranks(unknown)} was requested, and this run has {of_ranks(sorted(known))}. Name ranks of it."
        )
    ended = [rank for rank in chosen if rank not in running]
    if view.state != "running" or ended or not chosen:
        state = f"{of_ranks(ended)} of it {'is' if len(ended) == 1 else 'are'} not running" if ended else "no rank runs"
        found = f"the run is {view.state}" if view.state != "running" else state
        raise StateError(f"A profile was requested, and {found}. Profile ranks while they train.")
    if busy := [rank for rank in chosen if known[rank].requested_profile is not None]:
        raise StateError(
            f"A profile was requested, and that of {of_ranks(busy)} is under way. Request another when its table is there."
        )
    return tuple(chosen)
