"""The function in processes that a launcher started already: this one is one rank, and runs it right here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from accelerate_nb.config.environment import runs_folder
from accelerate_nb.config.run import RunConfig
from accelerate_nb.devices.probe import probe
from accelerate_nb.events.asks import current_asks
from accelerate_nb.events.capture import Line
from accelerate_nb.events.model import Event, Failure, LogLine, State, StateChange, Stream
from accelerate_nb.events.record import Record, new_folder, prune
from accelerate_nb.events.view import RankView, RunView
from accelerate_nb.launching.attempt import Scene, Stop
from accelerate_nb.launching.diagnosis import Look
from accelerate_nb.launching.ending import Ending
from accelerate_nb.launching.launched import Together, Told
from accelerate_nb.launching.outcome import failure_of
from accelerate_nb.launching.overhearing import overhearing
from accelerate_nb.launching.payload import Call
from accelerate_nb.launching.run import FrontEnd, RunHere
from accelerate_nb.launching.sampling import Sampler
from accelerate_nb.launching.sources import sources_here


class Present:
    """An attempt that is a call in this rank's process, and in those of all others, who make it too."""

    began = True
    timed_out: Look | None = None
    lost: str | None = None

    def __init__(self, call: Callable[[], Any], together: Together, scene: Scene) -> None:
        self._call, self._together, self._scene = call, together, scene
        self._rank = together.place.rank

    @property
    def last_step(self) -> int | None:
        """The step after which ranks stopped because they were asked to."""
        return current_asks().steps if current_asks().stopping else None

    def follow(self) -> tuple[Ending, ...]:
        """Call the function, and hear what came of it elsewhere."""
        self._say("running")
        try:
            told = self._together.call(self._heard, self._seen)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - reported, then raised where the run is waited for
            failure = self._scene.view.rank(self._rank).failure or failure_of(error, self._rank, sources_here())
            return self._endings([Told(self._rank, failure=failure, error=error)])
        for one in told:
            for event in _events(one.seen) if one.seen is not None and one.rank != self._rank else ():
                self._scene.take(event)
        return self._endings(told)

    def _heard(self) -> Any:
        with overhearing(self._rank, self._scene.take, self._write):
            return self._call()

    def _seen(self, failure: Failure | None) -> RankView:
        """What this rank's run knows of it, for the others."""
        if failure is not None:
            self._scene.take(failure)
        self._say("finished" if failure is None else "stopped" if failure.ended_by_us else "failed")
        self._scene.record.flush()
        return self._scene.view.rank(self._rank)

    def _write(self, stream: Stream, raw: bytes, lines: list[Line]) -> None:
        if raw:
            self._scene.record.output(self._rank, raw)
        for line in lines:
            self._scene.view.apply(LogLine(self._rank, stream, line.text, time.time(), line.open))

    def _say(self, state: State) -> None:
        self._scene.take(StateChange(self._rank, state, time.time()))

    def _endings(self, told: Sequence[Told]) -> tuple[Ending, ...]:
        known = {one.rank: one.ending for one in told}
        return tuple(known.get(rank, Ending(rank)) for rank in range(self._together.place.size))

    def tell(self, rank: int, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """A call has no inbox."""
        return False

    def listen_anew(self, patience: float) -> None:
        """Nobody listens."""

    def stop(self, how: Stop) -> None:
        """Whoever started the processes stops them."""

    def look(self) -> Look:
        """Where the call is, this process's own tools tell."""
        return Look({}, {})


class RunPresent(RunHere):
    """A run on processes that are there already, as the process of one rank has it: it is over when the launch comes back."""

    def logs(self, rank: int) -> str:
        """All that a rank wrote through Python's streams; of one on a machine that does not share the folder, the last lines."""
        if self.log_file(rank).exists():
            return super().logs(rank)
        lines = self.view.rank(rank).lines
        return "".join(f"{line.text}\n" for line in lines)


class _OutputOnly(Record):
    """The record of any rank but the first, which keeps the events of all."""

    def event(self, event: Event) -> None:
        """Rank 0 keeps it."""

    def status(self, **facts: Any) -> None:
        """Rank 0 keeps it."""


def prepare_present(call: Call, config: RunConfig, environ: Mapping[str, str], front_end: FrontEnd) -> RunPresent:
    """A run of the call in the processes that are there, ready to be started; every one of them has to do so."""
    together = Together(environ, "all")
    place, wish = together.place, config.launching
    parent = (Path(wish.folder) if wish.folder else runs_folder(os.environ)).expanduser().absolute()
    folder = Path(together.gathering.of_main("folder", lambda: str(new_folder(parent, call.name))))
    record = Record(folder) if place.rank == 0 else _OutputOnly(folder)
    scene = Scene(
        view=RunView(), record=record, sources=sources_here(), deadline=None, grace=wish.grace, quiet=wish.quiet
    )
    kind = "cpu" if wish.cpu else probe().kind
    wanted: Literal["main", "all"] = wish.results
    return RunPresent(
        scene=scene,
        attempt=lambda _: Present(call, together, scene),
        max_restarts=0,
        timeout=None,
        results=wanted,
        front_end=front_end,
        name=call.name,
        why=f"in the {place.size} processes that a launcher started",
        at_end=lambda _: prune(parent) if place.rank == 0 else None,
        sampler=Sampler(scene.view, place.size, kind, os.environ, [folder, Path.cwd()]),
    )


def _events(seen: RankView) -> Iterator[Event]:
    """What another rank's run has seen of it, as it came there."""
    yield from seen.lines
    for metrics in seen.series.values():
        yield from metrics
    yield from seen.progress.values()
    if seen.failure is not None:
        yield seen.failure
    yield StateChange(seen.rank, seen.state, time.time(), seen.detail)
