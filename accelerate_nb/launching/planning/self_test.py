"""The self-test: real workers with the very settings try what training needs, one thing after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from accelerate_nb.config.run import RunConfig
from accelerate_nb.errors import AccelerateNbError, HangError, WorkerError
from accelerate_nb.events.checks import Check, from_display
from accelerate_nb.launching.functions import prepare
from accelerate_nb.launching.run import Run, Watched

# A test that takes longer than this hangs.
_PATIENCE = 120.0
_START = Check("start", "Workers start", "waiting")


class SelfCheck:
    """
    One test of a configuration, for a front end: `run` takes as long as the test, `stop` ends it from another thread.

    `told` is called with each check whenever there is news of it, from the thread that runs the test.
    """

    def __init__(self, config: RunConfig, told: Callable[[Check], None] = lambda _: None) -> None:
        self._config = _for_a_test(config)
        self._told = told
        self._checks: dict[str, Check] = {}
        self._run: Run | None = None
        self._stopped = threading.Event()

    @property
    def checks(self) -> list[Check]:
        """Every check so far, in the order in which they are made."""
        return list(self._checks.values())

    def run(self) -> list[Check]:
        """Make all checks; never raises because of what they find."""
        self._take(replace(_START, state="running"))
        try:
            self._run = run = prepare(_in_a_worker, (), self._config, _Listener(self._take_from))
            if not self._stopped.is_set():
                run.start().wait()
        except AccelerateNbError as error:
            self._fail(error)
        self._leave_out_the_rest()
        return self.checks

    def stop(self) -> None:
        """End the test; what was not looked at is left out."""
        self._stopped.set()
        if (run := self._run) is not None:
            run.ask("interrupt")

    def _take_from(self, run: Watched, check: Check) -> None:
        if self._checks["start"].state == "running":
            self._take(replace(_START, state="passed", text=run.why))
        self._take(check)

    def _take(self, check: Check) -> None:
        self._checks[check.name] = check
        self._told(check)

    def _fail(self, error: AccelerateNbError) -> None:
        """Put an error where the test was when it came."""
        running = next((one for one in self.checks if one.state == "running"), None)
        if running is None or self._stopped.is_set():
            return
        text, advice = _told_of(error)
        self._take(replace(running, state="failed", text=text, advice=advice))

    def _leave_out_the_rest(self) -> None:
        for check in self.checks:
            if check.state in {"waiting", "running"}:
                self._take(replace(check, state="left out"))


def run(config: RunConfig, told: Callable[[Check], None] = lambda _: None) -> list[Check]:
    """
    Try a configuration with real workers, and return what each check found; `told` hears of them while they are made.

    >>> [check.state for check in run(resolve({"num_processes": 2}, os.environ))]
    ['passed', 'passed', 'passed', 'passed', 'passed', 'passed', 'passed']
    """
    return SelfCheck(config, told).run()


class _Listener:
    """A front end that hears checks, and shows nothing."""

    def __init__(self, heard: Callable[[Watched, Check], None]) -> None:
        self._heard = heard
        self._watched: Watched | None = None
        self._cursor = 0

    def opened(self, run: Watched) -> None:
        self._watched = run

    def refresh(self) -> None:
        assert self._watched is not None, "a run is opened before it is drawn"
        news = self._watched.view.since(self._cursor)
        self._cursor = news.cursor
        for shown in news.shown:
            if (check := from_display(shown)) is not None:
                self._heard(self._watched, check)

    def closed(self) -> None:
        self.refresh()

    def follow(self, run: Watched) -> None:
        self.opened(run)

    def show(self, run: Watched) -> None:
        self.opened(run)


def _for_a_test(config: RunConfig) -> RunConfig:
    """The configuration with what would make a test longer, or touch the notebook's own process, left out."""
    wish = config.launching
    return replace(
        config,
        launching=replace(
            wish,
            # in the notebook's own process the test would leave its traces
            engine="auto" if wish.engine == "inline" else wish.engine,
            num_processes=1 if wish.engine == "inline" else wish.num_processes,
            max_restarts=0,
            timeout=_PATIENCE,
            results="main",
            quiet=0.0,
        ),
    )


def _told_of(error: AccelerateNbError) -> tuple[str, str]:
    """An error in two parts for people: what happened, and what to do."""
    if isinstance(error, HangError):
        return f"it did not end within {_PATIENCE:g} s", f"Where the ranks were stands in {error.folder}{os.sep}"
    if not isinstance(error, WorkerError) or not error.failures:
        return str(error), ""
    first = next(one for one in error.failures if one.rank == error.rank)
    advice = first.advice or f"All output: {error.folder}"
    return f"rank {first.rank}: {first.type}: {first.message}", advice


def _in_a_worker() -> None:
    """Make the checks; the worker's own side is reached by its name, so that the kernel never imports it."""
    import_module("accelerate_nb.runtime.selfcheck").run_checks()
