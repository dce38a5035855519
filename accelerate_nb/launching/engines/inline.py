"""The function in this very process: one rank, its own breakpoints and debugger."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate_nb.config.environment import saying
from accelerate_nb.events import pending
from accelerate_nb.events.asks import current_asks
from accelerate_nb.events.model import StateChange
from accelerate_nb.launching.attempt import Scene, Stop
from accelerate_nb.launching.diagnosis import Look
from accelerate_nb.launching.ending import Ending
from accelerate_nb.launching.outcome import failure_of
from accelerate_nb.launching.sources import sources_here


class Here:
    """An attempt that is a plain call; what it prints goes where this process prints."""

    began = True
    timed_out: Look | None = None
    last_step: int | None = None
    lost: str | None = None

    def __init__(self, call: Callable[[], Any], environ: dict[str, str], scene: Scene) -> None:
        self._call, self._environ, self._scene = call, environ, scene

    def follow(self) -> tuple[Ending, ...]:
        """Call the function."""
        asks = current_asks()
        asks.reset()
        try:
            return self._called()
        finally:
            # what was asked of the call is not asked of what this process does next
            self.last_step = asks.steps if asks.stopping else None
            asks.reset()

    def _called(self) -> tuple[Ending, ...]:
        self._scene.take(StateChange(0, "running", time.time()))
        try:
            with saying(self._environ, os.environ):
                value = self._call()
                pending.finish()
        except KeyboardInterrupt:
            self._scene.take(StateChange(0, "stopped", time.time()))
            raise
        except BaseException as error:  # noqa: BLE001 - reported, then raised again as what every engine raises
            pending.salvage()
            failure = failure_of(error, 0, sources_here())
            self._scene.take(failure)
            self._scene.take(StateChange(0, "failed", time.time()))
            return (Ending(0, failure=failure, error=error),)
        self._scene.take(StateChange(0, "finished", time.time()))
        return (Ending(0, value=value),)

    def tell(self, rank: int, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """A call has no inbox."""
        return False

    def listen_anew(self, patience: float) -> None:
        """Nobody listens."""

    def stop(self, how: Stop) -> None:
        """Let the call end after its step; one that makes none can't be stopped from outside, but by an interrupt."""
        if (position := current_asks().hold()) is not None:
            current_asks().until(position.steps + 1, raises=not position.looks)

    def look(self) -> Look:
        """Where the call is, this process's own tools tell."""
        return Look({}, {})
