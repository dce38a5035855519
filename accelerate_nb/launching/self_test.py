"""The self-test: real workers with the very settings try what training needs, one thing after the other."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace

from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.errors import AccelerateNbError, HangError, WorkerError
from accelerate_nb.events.event_types import CheckResult
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.launching.launcher import prepare
from accelerate_nb.launching.run import FrontEnd, Run
from accelerate_nb.worker.self_test import run_checks_on_rank

# A test that takes longer than this hangs.
_TIMEOUT = 120.0
_START = CheckResult("start", "Workers start", "waiting")


class SelfTest(FrontEnd):
    """One test of a configuration, as the front end of its run; `on_check` is called in `run`'s thread."""

    def __init__(self, config: RunConfig, on_check: Callable[[CheckResult], None] = lambda _: None) -> None:
        launching, is_inline = config.launching, config.launching.engine == "inline"
        # without what would make a test longer, or leave its traces in the notebook's own process
        launching = replace(
            launching,
            engine="auto" if is_inline else launching.engine,
            num_processes=1 if is_inline else launching.num_processes,
            max_restarts=0,
            timeout=_TIMEOUT,
            results="main",
            hang_warning_after=0.0,
        )
        self._config = replace(config, launching=launching)
        self._on_check, self._cursor = on_check, 0
        self._checks: dict[str, CheckResult] = {}
        self._run: Run | None = None
        self._stopped = threading.Event()

    @property
    def checks(self) -> list[CheckResult]:
        """Every check so far, in the order in which they are made."""
        return list(self._checks.values())

    def run(self) -> list[CheckResult]:
        """Make all checks; never raises because of what they find."""
        self._take(replace(_START, state="running"))
        try:
            conductor = prepare(run_checks_on_rank, (), self._config)
            self._run = run = Run(conductor, self)
            if not self._stopped.is_set():
                run.start().wait()
        except AccelerateNbError as error:
            text, advice = str(error), ""
            if isinstance(error, HangError):
                text = f"it did not end within {_TIMEOUT:g} s"
                advice = f"Where the ranks were stands in {shown_path(error.folder or '')}{os.sep}"
            elif isinstance(error, WorkerError) and error.failures:
                first = next(failure for failure in error.failures if failure.rank == error.rank)
                text = f"rank {first.rank}: {first.type}: {first.message}"
                advice = first.advice or f"All output: {shown_path(error.folder or '')}"
            # where the test was when it came: at the check that ran, else at the next one, else at the last
            at = [check for state in ("running", "waiting") for check in self.checks if check.state == state]
            if not self._stopped.is_set():
                self._take(replace((at or self.checks[-1:])[0], state="failed", text=text, advice=advice))
        for check in self.checks:
            if check.state in {"waiting", "running"}:
                self._take(replace(check, state="left out"))
        return self.checks

    def stop(self) -> None:
        """End the test, from any thread; checks that were not made are left out."""
        self._stopped.set()
        if (run := self._run) is not None:
            run.request_stop("interrupt")

    def refresh(self) -> None:
        assert self._run is not None, "a run is made before it is drawn"
        news = self._run.view.since(self._cursor)
        self._cursor = news.cursor
        for check in filter(None, map(CheckResult.of, news.items)):
            if self._checks["start"].state == "running":
                self._take(replace(_START, state="passed", text=self._run.why))
            self._take(check)

    closed = refresh

    def _take(self, check: CheckResult) -> None:
        self._checks[check.name] = check
        self._on_check(check)


def run(config: RunConfig, on_check: Callable[[CheckResult], None] = lambda _: None) -> list[CheckResult]:
    """
    Try a configuration with real workers, and return what each check found; `on_check` is called with them while they are made.

    >>> [check.state for check in run(resolve({"num_processes": 2}, os.environ))]
    ['passed', 'passed', 'passed', 'passed', 'passed', 'passed', 'passed']
    """
    return SelfTest(config, on_check).run()
