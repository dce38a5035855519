"""The conductor of a detached run, as a process sees it that attached to the run: a socket to the run host, and the run's folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from accelerate_nb.errors import LaunchError, StateError
from accelerate_nb.events.run_folder import shown_path, status_of
from accelerate_nb.events.run_reader import RunFollower, SavedRun, kept_run
from accelerate_nb.events.terminal_lines import plain_name
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.launching.detached.control import ControlClient, apply_live, check_owner, tunnel_command
from accelerate_nb.launching.detached.saved_outcome import read_error, read_results
from accelerate_nb.launching.run import LaunchFacts
from accelerate_nb.launching.step_requests import checked_ranks
from accelerate_nb.launching.worker_group import Stop
from accelerate_nb.rank.step_hold import checked_change
from accelerate_nb.transport.messages import (
    ChangeKnob,
    LiveState,
    Message,
    QueryLiveState,
    QueryStacks,
    RequestProfile,
    RequestStop,
    StacksReply,
)

# How often the folder is read for what is new, and the run host is asked for what is not in it.
_BETWEEN_READS = 0.1
_BETWEEN_REQUESTS = 0.5
# How often the folder is asked whether the run is over, where its host does not reply.
_BETWEEN_CHECKS = 1.0
_STACKS_TIMEOUT = 30.0


class RemoteConductor:
    """
    The conductor of a run in its run host, as a process sees it that attached to the run.

    >>> run = Run(RemoteConductor(kept_run(folder)), NoFrontEnd())
    >>> run.start().wait()
    """

    # the run host keeps what there is to keep
    trouble = None

    def __init__(self, saved: SavedRun) -> None:
        check_owner(saved.folder)
        status = status_of(saved.folder) or {}
        self._follower = RunFollower(saved)
        self.view = self._follower.view
        self.facts = LaunchFacts(
            name=plain_name(saved.name),
            why=saved.why,
            folder=saved.folder,
            started=saved.started,
            results="all" if status.get("results") == "all" else "main",
            stop_grace_period=float(status.get("stop_grace_period") or 0.0),
            tags=saved.tags,
            function=saved.function,
            arguments=saved.arguments,
            is_detached=True,
            outlives_wait=True,
        )
        self.over = threading.Event()
        self.main_rank = 0
        self._rank_results: tuple[RankResult, ...] = ()
        self._error: BaseException | None = None
        control = status.get("control")
        self._client = None if control is None else ControlClient(Path(control), tunnel_command(status))
        self._is_hosted, self._is_lost, self._end_text = saved.is_detached, saved.is_lost, saved.error
        self._thread: threading.Thread | None = None
        # whether the run host has replied that the run goes on
        self._is_replying = False
        self._follower.update()
        if saved.is_over:
            self._end(saved)

    # ------------------------------------------------------------------------------------------------------ reading

    @property
    def error(self) -> BaseException | None:
        """The exception of the run's end, once it is over."""
        self._read_outcome()
        return self._error

    @property
    def rank_results(self) -> tuple[RankResult, ...]:
        """The results of all ranks, as far as they can be unpickled here; empty while they run."""
        self._read_outcome()
        return self._rank_results

    @property
    def is_going_on(self) -> bool:
        """Whether it may still end by itself."""
        return not self.over.is_set()

    def log_file(self, rank: int) -> Path:
        """The file that holds what a rank wrote, as far as the run host has written it."""
        return self.facts.folder / f"rank_{rank}.log"

    def stacks(self) -> str:
        """The position of every rank that still runs."""
        if self.over.is_set():
            return ""
        reply = self._request(QueryStacks(), _STACKS_TIMEOUT)
        return reply.text if isinstance(reply, StacksReply) else ""

    # ------------------------------------------------------------------------------------------------------- acting

    def start(self) -> None:
        """Follow the run from now on, in a thread of its own."""
        if not self.over.is_set() and self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="accelerate_nb attach", daemon=True)
            self._thread.start()

    def request_stop(self, how: Stop) -> None:
        """Request the end, from any thread, without waiting for it: "finish", "interrupt" or "kill" (see `Run.request_stop`)."""
        if not self.over.is_set():
            self._request(RequestStop(how))

    def set_knob(self, name: str, value: float) -> None:
        """Change a knob on all ranks after the same optimizer step, without waiting for it."""
        if self.over.is_set():
            raise StateError(f"Knob {name!r} was to be changed, and the run is over. Knobs change while it runs.")
        self._request(ChangeKnob(name, checked_change(self.view.knobs(), name, value)))

    def profile(self, steps: int = 10, ranks: Iterable[int] | None = None) -> None:
        """Have ranks profile their next optimizer steps, without waiting for it."""
        self._request(RequestProfile(steps, checked_ranks(self.view, steps, ranks)))

    # ------------------------------------------------------------------------------------------------------- inside

    def _request(self, message: Message, timeout: float = 5.0) -> Message:
        if self._client is None:
            raise LaunchError(f"{self.facts.name} runs in the process that launched it, and can be stopped only there.")
        try:
            return self._client.request(message, timeout)
        except OSError as error:
            raise LaunchError(
                f"The process that conducts {self.facts.name} did not reply: {error}. `accelerate-nb runs` shows what is known of it; "
                f"its folder is {shown_path(self.facts.folder)}."
            ) from None

    def _follow(self) -> None:
        next_request = next_check = 0.0
        saved: SavedRun | None = None
        while True:
            is_over = False
            now = time.monotonic()
            if now >= next_request:
                next_request = now + _BETWEEN_REQUESTS
                is_over = self._take_live_state()
            if is_over or now >= next_check:
                next_check = now + _BETWEEN_CHECKS
                saved = kept_run(self.facts.folder)
                # a run host that replies is there, whatever became of the folder
                is_over = not self._is_replying and (saved is None or saved.is_over)
            # first the state, then the lines: what was written before the end is not missed
            self._follower.update()
            if is_over:
                break
            time.sleep(_BETWEEN_READS)
        self._end(saved or self._removed())

    def _take_live_state(self) -> bool:
        """Take what the folder does not keep; whether the run host reports the end."""
        if self._client is None:
            return False
        try:
            reply = self._client.request(QueryLiveState())
        except OSError:
            self._is_replying = False
            return True
        self._is_replying = isinstance(reply, LiveState) and not reply.done
        if not isinstance(reply, LiveState):
            return False
        # an event that only another version of this package knows
        with suppress(ValueError, TypeError):
            apply_live(self.view, reply.events)
        return reply.done

    def _removed(self) -> SavedRun:
        status = SavedRun(
            self.facts.folder,
            self.facts.name,
            self.facts.why,
            "failed",
            self.facts.started,
            None,
            len(self.view.ranks),
            "",
        )
        return replace(status, error="its folder was removed while it ran")

    def _end(self, saved: SavedRun) -> None:
        self.view.replace_open_lines(())
        self._follower.finish(saved)
        self._end_text = saved.error
        self._is_lost = saved.is_lost
        if self._client is not None:
            self._client.close()
        self.over.set()

    def _read_outcome(self) -> None:
        """Unpickle the results, again where that failed before: a cell that defines a class may have run since."""
        if not self.over.is_set() or (self._rank_results and not any(item.left_out for item in self._rank_results)):
            return
        with suppress(OSError):
            self.main_rank = int((status_of(self.facts.folder) or {}).get("main_rank") or 0)
            self._rank_results = read_results(self.facts.folder, self.view)
            self._error = self._what_ended_it()

    def _what_ended_it(self) -> BaseException | None:
        if not self.facts.folder.is_dir():
            return LaunchError(
                f"{self.facts.name} has ended, and its results are gone: {self._end_text or 'its folder was removed'}."
            )
        if self._is_lost:
            return LaunchError(
                f"{self.facts.name} was lost: {self._end_text}. All output: {shown_path(self.facts.folder)}"
            )
        if not self._is_hosted:
            # its results and its error went to the process that launched it
            failed = self.view.state != "finished"
            return LaunchError(f"{self.facts.name} {self.view.state}: {self._end_text}") if failed else None
        return read_error(self.facts.folder, self._rank_results, self.view)
