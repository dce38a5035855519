"""A call in processes that a launcher has started already: each of them calls the function, and tells the others what came of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

from accelerate_nb.config.environment import saying
from accelerate_nb.devices.randomness import random_states_here
from accelerate_nb.events import pending
from accelerate_nb.events.model import Failure
from accelerate_nb.events.view import RankView
from accelerate_nb.launching.blame import worker_error
from accelerate_nb.launching.ending import Ending
from accelerate_nb.launching.gathering import Place, gather
from accelerate_nb.launching.outcome import failure_of, portable
from accelerate_nb.launching.pickling import dump_homeward, load
from accelerate_nb.launching.sources import sources_here
from accelerate_nb.notices import notice

# How long a rank that failed waits for the others, where all have to meet to be what they were; and those for each other.
_SETTLE = 5.0


@dataclass(frozen=True, slots=True)
class Told:
    """
    What a rank tells the others: what its function returned, or its failure with the exception as far as it can travel.

    `has_value` says whether the value came along, `seen` is what the rank's run knows of it.
    """

    rank: int
    value: Any = None
    has_value: bool = False
    failure: Failure | None = None
    error: BaseException | None = None
    seen: RankView | None = None

    @property
    def ending(self) -> Ending:
        """How the rank ended."""
        return Ending(self.rank, value=self.value, failure=self.failure, error=self.error)


class Together:
    """
    One call on all processes that are there.

    While it runs, this process has joined nothing that it had not joined inside of the call: it meets the others anew, as
    freshly started processes do. What it had joined before waits, and goes on afterwards.

    With `share="main"` every process is told rank 0's value, with "all" each rank's.
    """

    def __init__(self, environ: Mapping[str, str], share: Literal["main", "all"]) -> None:
        self._environ, self._share = environ, share
        self._aside = import_module("accelerate_nb.runtime.aside")
        self.place = Place.read(os.environ)
        self._lasting = self._aside.lasting_store() if self.place.size > 1 else None
        self.gathering = gather(self._lasting, self.place)

    def call(
        self, call: Callable[[], Any], seen: Callable[[Failure | None], RankView | None] = lambda _: None
    ) -> tuple[Told, ...]:
        """
        What every rank has told of the call, in the order of ranks; `seen` says what this one's run has seen of it.

        An exception of this process's own is raised as it is; those of others are in what they have told. A rank that has not
        ended some seconds after another one has failed has told nothing.
        """
        __tracebackhide__ = True
        # who is still in a collective of before would lose its connection
        self.gathering.come("begun")
        states, waiting = random_states_here(gpus=True), self._aside.put_aside()
        # with copies of the states, as a worker that was started
        random_states_here().install()
        try:
            with saying({**self._environ, **self.gathering.environ}, os.environ):
                value = call()
                pending.finish()
        except BaseException as error:
            self._fail(error, waiting, seen)
            raise
        else:
            shares = self._share == "all" or self.place.rank == 0
            own = Told(self.place.rank, value, True, seen=seen(None))
            self._tell(own if shares else replace(own, value=None, has_value=False))
            return self._end(waiting, _SETTLE, own)
        finally:
            # what the function drew is nobody else's affair, as where it runs in processes of its own
            states.install()

    def _fail(self, error: BaseException, waiting: Any, seen: Callable[[Failure | None], RankView | None]) -> None:
        """Tell of an exception, which goes on its way whatever becomes of that."""
        pending.salvage()
        rank = self.place.rank
        failure = failure_of(error, rank, sources_here())
        told = Told(rank, failure=failure, error=portable(error, _names()), seen=seen(failure))
        try:
            self._tell(told)
            self._end(waiting, _SETTLE if waiting.meets else 0.0, told)
        except RuntimeError:
            # the others can't be met any more
            waiting.leave()

    def _tell(self, told: Told) -> None:
        if self.place.size == 1:
            self.gathering.tell([], failed=told.failure is not None)
            return
        try:
            entries = dump_homeward(told, _names())
        except Exception as error:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
            notice(
                f"What rank {told.rank} returned, {type(told.value).__name__}, can't be pickled ({error}): it stays in its "
                "process, and others have their own or None in its place. Return what can be pickled."
            )
            entries = dump_homeward(replace(told, value=None, has_value=False), _names())
        self.gathering.tell(entries, failed=told.failure is not None)

    def _end(self, waiting: Any, patience: float, own: Told) -> tuple[Told, ...]:
        """Hear what others have told; then this process is again what it was before."""
        there = self.gathering.wait(patience)
        told = tuple(self._heard(rank, own) for rank in there)
        waiting.leave()
        if waiting.meets and self.gathering.decide("meet" if len(there) == self.place.size else "part") == "meet":
            waiting.meet(self._meeting_place())
        self.gathering.leave(wait=all(one.failure is None for one in told))
        return told

    def _heard(self, rank: int, own: Told) -> Told:
        if self.place.size == 1:
            return own
        told: Told = load(self.gathering.heard(rank))
        return own if rank == own.rank and not told.has_value else told

    def _meeting_place(self) -> Any:
        from torch.distributed import HashStore, PrefixStore

        return PrefixStore(f"{self.gathering.name}/after", self._lasting or HashStore())


def called(call: Callable[[], Any], environ: Mapping[str, str], results: Literal["main", "all"]) -> Any:
    """
    What a launcher returns in a process that is there already: rank 0's value, or a list of every rank's.

    A value that can't travel stays in its process: there it is in its place, and elsewhere `None` is in a list, or the
    process's own value in place of rank 0's.
    """
    __tracebackhide__ = True
    together = Together(environ, results)
    told = together.call(call)
    if any(one.failure is not None for one in told):
        raise worker_error([one.ending for one in told], None)
    return values(told, together.place.rank, results)


def values(told: Sequence[Told], rank: int, results: Literal["main", "all"]) -> Any:
    """What the ranks' function returned, as it was asked for, in the process of a rank."""
    if results == "all":
        return [one.value for one in told]
    return told[0].value if told[0].has_value else told[rank].value


def _names() -> frozenset[str]:
    """Every process runs the same script, and finds its functions and classes under the same names."""
    return frozenset(vars(sys.modules["__main__"]))
