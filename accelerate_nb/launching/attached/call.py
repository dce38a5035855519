"""A call in processes that a launcher has started already: each calls the function, and sends its report to the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from accelerate_nb.config.environment import set_variables
from accelerate_nb.events.model import Failure
from accelerate_nb.events.rank_state import RankState
from accelerate_nb.failures.exception_copy import raise_as_it_is
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.failures.worker_error import worker_error
from accelerate_nb.launching.attached.rendezvous import AttachedRank, Decision, next_call_store
from accelerate_nb.rank import background_tasks
from accelerate_nb.rank.rng_state import current_random_states
from accelerate_nb.sources.cells import current_sources
from accelerate_nb.transport.exception_chain import portable
from accelerate_nb.transport.outcome import failure_of
from accelerate_nb.transport.serializer import dump_homeward, load
from accelerate_nb.user_warnings import warn_user
from accelerate_nb.worker import attached_state

# How long a rank that failed waits for the others, where all have to rejoin their groups; and those for each other.
_SETTLE = 5.0


@dataclass(frozen=True, slots=True)
class RankReport:
    """
    A rank's report to the others: its return value, or its failure with the exception as far as it can travel.

    `has_value` is whether the value came along, `seen` is the state of the rank in its own run.
    """

    rank: int
    value: Any = None
    has_value: bool = False
    failure: Failure | None = None
    error: BaseException | None = None
    seen: RankState | None = None

    @property
    def rank_result(self) -> RankResult:
        """The report as a result of the rank."""
        return RankResult(self.rank, value=self.value, failure=self.failure, error=self.error)


class AttachedCall:
    """
    One call on all processes of the launch.

    While it runs, this process has joined nothing that it had not joined inside of the call: it joins the others anew, as
    freshly started processes do. What it had joined before waits, and goes on afterwards.

    With `share="main"` every process gets rank 0's value, with "all" each rank's.
    """

    def __init__(self, environ: Mapping[str, str], share: Literal["main", "all"]) -> None:
        self._environ, self._share = environ, share
        self.attached_rank = AttachedRank.read(os.environ)
        self._lasting = attached_state.lasting_store() if self.attached_rank.size > 1 else None
        self.store = next_call_store(self._lasting, self.attached_rank)

    def call(
        self, call: Callable[[], Any], seen: Callable[[Failure | None], RankState | None] = lambda _: None
    ) -> tuple[RankReport, ...]:
        """
        Make the call; returns the reports of all ranks, in the order of ranks. `seen` gives the state of this rank in its run.

        An exception of this process's own is raised as it is; those of others are in their reports. A rank that has not ended
        some seconds after another one has failed has no report.
        """
        __tracebackhide__ = True
        # who is still in a collective of before would lose its connection
        self.store.barrier("begun")
        states, waiting = current_random_states(gpus=True), attached_state.suspend()
        # with copies of the states, as a worker that was started
        current_random_states().install()
        try:
            with set_variables({**self._environ, **self.store.environ}, os.environ):
                value = call()
                background_tasks.finish()
        except BaseException as error:
            self._fail(error, waiting, seen)
            raise
        else:
            shares = self._share == "all" or self.attached_rank.rank == 0
            own_report = RankReport(self.attached_rank.rank, value, True, seen=seen(None))
            self._send(own_report if shares else replace(own_report, value=None, has_value=False))
            return self._end(waiting, _SETTLE, own_report)
        finally:
            # what the function drew is nobody else's affair, as where it runs in processes of its own
            states.install()

    def _fail(self, error: BaseException, waiting: Any, seen: Callable[[Failure | None], RankState | None]) -> None:
        """Report an exception, which is raised whatever becomes of the report."""
        background_tasks.salvage()
        rank = self.attached_rank.rank
        failure = failure_of(error, rank, current_sources())
        report = RankReport(rank, failure=failure, error=portable(error, _names()), seen=seen(failure))
        try:
            self._send(report)
            self._end(waiting, _SETTLE if waiting.meets else 0.0, report)
        except RuntimeError:
            # the others can't be reached any more
            waiting.leave()

    def _send(self, report: RankReport) -> None:
        if self.attached_rank.size == 1:
            self.store.send([], failed=report.failure is not None)
            return
        try:
            entries = dump_homeward(report, _names())
        except Exception as error:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
            warn_user(
                f"What rank {report.rank} returned, {type(report.value).__name__}, can't be pickled ({error}): it stays in its "
                "process, and others have their own or None in its place. Return what can be pickled."
            )
            entries = dump_homeward(replace(report, value=None, has_value=False), _names())
        self.store.send(entries, failed=report.failure is not None)

    def _end(self, waiting: Any, timeout: float, own_report: RankReport) -> tuple[RankReport, ...]:
        """Receive the reports of the others; then this process is again what it was before."""
        there = self.store.wait(timeout)
        reports = tuple(self._received(rank, own_report) for rank in there)
        waiting.leave()
        proposal: Decision = "rejoin" if len(there) == self.attached_rank.size else "part"
        if waiting.meets and self.store.decide(proposal) == "rejoin":
            waiting.join_groups(self._rejoin_store())
        self.store.leave(wait=all(report.failure is None for report in reports))
        return reports

    def _received(self, rank: int, own_report: RankReport) -> RankReport:
        if self.attached_rank.size == 1:
            return own_report
        report: RankReport = load(self.store.receive(rank))
        return own_report if rank == own_report.rank and not report.has_value else report

    def _rejoin_store(self) -> Any:
        from torch.distributed import HashStore, PrefixStore

        return PrefixStore(f"{self.store.name}/after", self._lasting or HashStore())


def called(call: Callable[[], Any], environ: Mapping[str, str], results: Literal["main", "all"]) -> Any:
    """
    Call a function in a process that a launcher started; returns rank 0's value, or a list of every rank's.

    A value that can't travel stays in its process: there it is in its place, and elsewhere `None` is in a list, or the
    process's own value in place of rank 0's.
    """
    __tracebackhide__ = True
    attached_call = AttachedCall(environ, results)
    reports = attached_call.call(call)
    if any(report.failure is not None for report in reports):
        raise_as_it_is(worker_error([report.rank_result for report in reports], None))
    return values(reports, attached_call.attached_rank.rank, results)


def values(reports: Sequence[RankReport], rank: int, results: Literal["main", "all"]) -> Any:
    """The return values of the ranks' function in the requested form, in the process of a rank."""
    if results == "all":
        return [report.value for report in reports]
    return reports[0].value if reports[0].has_value else reports[rank].value


def _names() -> frozenset[str]:
    """Every process runs the same script, and finds its functions and classes under the same names."""
    return frozenset(vars(sys.modules["__main__"]))
