"""Waiting in tests: until something is so, as long as that may take where a machine is busy."""

import time
from collections.abc import Callable
from typing import Any

# Seconds; what never comes fails a test after them, what comes is not waited for longer than it takes.
TIMEOUT = 60.0


def until(condition: Callable[[], object], run: Any = None, timeout: float = TIMEOUT) -> None:
    """Wait until something is so; where a run ends before it, the test fails with the run's error."""
    deadline = time.monotonic() + timeout
    while True:
        # looked at first: what is so when a run is over is so
        is_over = run is not None and run.done
        if condition():
            return
        assert not is_over, run.error
        assert time.monotonic() < deadline, f"not within {timeout:g} s"
        time.sleep(0.02)


def until_lines(run: Any, count: int) -> None:
    """Wait until the ranks of a run have written so many lines of their own: up to torch 2.9, gloo writes one before."""

    def written() -> int:
        lines = [line for rank in run.view.ranks for line in run.view.rank(rank).lines]
        return sum(not line.text.startswith("[Gloo]") for line in lines)

    until(lambda: written() >= count, run)
