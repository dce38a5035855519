"""The picker's self-test: a button, and a list that fills while real workers try the settings."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence

import ipywidgets

from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.events.model import CheckResult
from accelerate_nb.launching.self_test import SelfTest
from accelerate_nb.notebook.picker import html


class TestSection:
    """The part of the form that tests the settings, in the background of the notebook."""

    __test__ = False  # its name is its own, and no test's

    def __init__(self, config: Callable[[], RunConfig]) -> None:
        self._config = config
        self._thread: threading.Thread | None = None
        self._check: SelfTest | None = None
        self.begin = ipywidgets.Button(description="Test these settings", tooltip="Try them with real workers")
        self.end = ipywidgets.Button(description="Stop the test", disabled=True)
        self._status, self._list = ipywidgets.HTML(), ipywidgets.HTML()
        self.begin.on_click(lambda _: self.start())
        self.end.on_click(lambda _: self.stop())
        row = ipywidgets.Box([self.begin, self.end]).add_class("acc-row")
        heading = ipywidgets.HTML(html.heading("Does it work?"))
        self.box = ipywidgets.VBox([heading, row, self._status, self._list]).add_class("acc-group")
        self._possible = True

    @property
    def checks(self) -> list[CheckResult]:
        """The results of the latest test so far."""
        return [] if self._check is None else self._check.checks

    def allow(self, *, possible: bool) -> None:
        """Set whether there is something to test."""
        self._possible = possible
        self.begin.disabled = not possible or self._is_running()

    def start(self) -> None:
        """Begin a test in the background, unless one runs."""
        if self._is_running():
            return
        check = SelfTest(self._config(), lambda _: self._draw(check.checks))
        self._check = check
        self.begin.disabled, self.end.disabled = True, False
        self._status.value, self._list.value = html.status("Testing with real workers…"), ""

        def work() -> None:
            try:
                self._finish(check.run())
            finally:
                self._thread = None
                self.begin.disabled, self.end.disabled = not self._possible, True

        # ipykernel knows by the context which cell a thread belongs to
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(work,), name="accelerate_nb self-test", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the running test; unfinished checks are left out."""
        if self._check is not None:
            self._check.stop()

    def wait(self, timeout: float | None = None) -> list[CheckResult]:
        """Wait until the test is over, and give what it found."""
        if (thread := self._thread) is not None:
            thread.join(timeout)
        return self.checks

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _draw(self, checks: Sequence[CheckResult]) -> None:
        self._list.value = html.checks(checks)

    def _finish(self, checks: Sequence[CheckResult]) -> None:
        self._draw(checks)
        states = [check.state for check in checks]
        if "failed" in states:
            text = f"{states.count('failed')} of {len(checks)} checks failed."
        elif "left out" in states:
            text = f"Stopped after {states.count('passed')} of {len(checks)} checks."
        else:
            text = f"All {len(checks)} checks passed."
        self._status.value = html.status(text)
