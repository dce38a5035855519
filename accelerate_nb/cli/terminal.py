"""What `accelerate-nb launch` shows of a run: every rank's lines, and in a terminal where each rank is below them."""

from __future__ import annotations

import sys

from accelerate_nb.events.model import LogLine
from accelerate_nb.launching.run import FrontEnd, Watched


def terminal(
    *,
    only_ranks: tuple[int, ...] | None = None,
    tee: bool = False,
    prefix_template: str | None = None,
    quiet: bool = False,
) -> FrontEnd:
    """
    The front end for this process's standard streams.

    `only_ranks` are those whose lines are shown; all are kept in the run's folder, so `tee` asks for what happens anyway.
    `prefix_template` is what stands before a line (`string.Template` of `role_name`, `local_rank`, `rank`). With `quiet`
    there is nothing but the lines of ranks, and of a run that failed the cause.

    The cause of a failure is told as soon as the run is over: who waits for the run says no more of a `WorkerError` where
    `has_told_failure` is true. Where the reader of the lines has gone (`| head`), the run is ended and `wait` raises
    `BrokenPipeError`.
    """
    return Terminal(only_ranks)


class Terminal:
    """Shows a run on the standard streams."""

    def __init__(self, only_ranks: tuple[int, ...] | None) -> None:
        self._only, self._cursor, self.has_told_failure = only_ranks, 0, False
        self._run: Watched | None = None

    def opened(self, run: Watched) -> None:
        """Somebody waits for the run from now on."""
        self._run = run

    def refresh(self) -> None:
        """Write what is new."""
        if self._run is None:
            return
        news = self._run.view.since(self._cursor)
        self._cursor = news.cursor
        for line in news.shown:
            if isinstance(line, LogLine) and (self._only is None or line.rank in self._only):
                print(f"[{line.rank}] {line.text}", file=getattr(sys, line.stream), flush=True)

    def closed(self) -> None:
        """Write the last."""
        self.refresh()

    def follow(self, run: Watched) -> None:
        """Show the run."""
        self.opened(run)

    def show(self, run: Watched) -> None:
        """Say in one line how the run is."""
        print(repr(run))
