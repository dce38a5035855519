"""A cell that runs on every rank: a run of its own, with what happened since it began, and the front end that shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from accelerate_nb.errors import HangError
from accelerate_nb.events.model import Display, IdleWarning, Progress, State, StateChange
from accelerate_nb.events.rank_state import Fact, RankSummary
from accelerate_nb.events.run_state import RunState
from accelerate_nb.launching.run import FrontEnd
from accelerate_nb.launching.session.cell_run import CellResult, CellRun
from accelerate_nb.launching.session.session import Session
from accelerate_nb.launching.worker_group import Stop
from accelerate_nb.notebook.display.text import TextFrontEnd
from accelerate_nb.notebook.display.text_output import TextSink


class CellHandle:
    """
    A cell as something to watch: its `view` holds what its ranks put out since it began, and how they ended it.

    The session's view knows of no cells, so this one follows it: `follow` takes over what is new there. `cursor` is where in the
    session's output the cell begins, and afterwards where it ended.

    >>> watch = CellHandle(session.run("train()"), 0)
    >>> while not watch.done: watch.follow()
    """

    def __init__(self, run: CellRun, cursor: int) -> None:
        self.cursor = cursor
        self._run = run
        self.view = RunState(len(run.view.ranks))
        self.name, self.why, self.folder, self.started = run.name, run.why, run.folder, run.started
        self._metrics_cursor = run.metrics_cursor
        self._bars = {rank: glance.progress for rank, glance in self._glances().items()}
        self._reported: set[int] = set()
        # what ranks said of their training before this cell is none of it
        self._facts = {fact for glance in self._glances().values() for fact in _facts(glance)}
        self._warning: IdleWarning | None = None
        self._is_over = False
        for rank in self.view.ranks:
            state: State = "running" if rank in run.ranks else "finished"
            self.view.apply(StateChange(rank, state, run.started, "" if rank in run.ranks else "has no part in it"))
        self.view.apply(StateChange(None, "running", run.started, run.why))

    @property
    def done(self) -> bool:
        """Whether every rank has ended the cell, and all of it is in the view."""
        return self._is_over

    def request_stop(self, how: Stop) -> None:
        """Request the end of the cell: an interrupt; a second one, or a kill, ends the session."""
        self._run.request_stop(how)

    def set_knob(self, name: str, value: float) -> None:
        """Change a knob on all ranks after the same optimizer step."""
        self._run.set_knob(name, value)

    def profile(self, steps: int = 10, ranks: Iterable[int] | None = None) -> None:
        """Have ranks of the cell profile their next optimizer steps."""
        self._run.profile(steps, ranks)

    def stacks(self) -> str:
        """The current stack of every rank."""
        return self._run.stacks()

    def log_file(self, rank: int) -> Path:
        """The file that holds all that a rank wrote so far in the session."""
        return self._run.log_file(rank)

    def follow(self) -> None:
        """Take over what is new."""
        if self._is_over:
            return
        # the text on the end comes after all output before it
        is_over, ends = self._run.done, self._run.ends
        self._take_output()
        for glance in self._glances().values():
            self._take_glance(glance)
        if self._run.view.host is not None:
            self.view.apply(self._run.view.host)
        if (warning := self._run.view.idle_warning) is not self._warning:
            self._warning = warning
            self.view.apply(warning or IdleWarning(0.0, "", time.time()))
        for end in ends:
            self._take_end(end)
        if is_over:
            self._finish()

    def _glances(self) -> dict[int, RankSummary]:
        return {glance.rank: glance for glance in self._run.view.glances() if glance.rank in self._run.ranks}

    def _take_output(self) -> None:
        source = self._run.view
        news, numbers = source.since(self.cursor), source.metrics_since(self._metrics_cursor)
        self.cursor, self._metrics_cursor = news.cursor, numbers.cursor
        for item in (*news.shown, *numbers.metrics):
            if item.rank in self._run.ranks:
                self.view.apply(item)

    def _take_glance(self, glance: RankSummary) -> None:
        for line in glance.open_lines:
            self.view.apply(line)
        former: dict[str, Progress] = self._bars.get(glance.rank, {})
        for name, bar in glance.progress.items():
            if former.get(name) is not bar:
                self.view.apply(bar)
        self._bars[glance.rank] = glance.progress
        for fact in _facts(glance):
            if fact not in self._facts:
                self._facts.add(fact)
                self.view.apply(fact)
        for sample in glance.devices.values():
            self.view.apply(sample)

    def _take_end(self, end: CellResult) -> None:
        if end.rank in self._reported:
            return
        self._reported.add(end.rank)
        if end.failure is not None:
            self.view.apply(end.failure)
        state: State = "finished" if end.ok else "stopped" if end.failure and end.failure.ended_by_us else "failed"
        self.view.apply(StateChange(end.rank, state, time.time()))

    def _finish(self) -> None:
        error = self._run.error
        if isinstance(error, HangError) and error.hang is not None:
            self.view.apply(error.hang)
        for failure in self._run.view.failures:
            # a process that has died ends the session, and the cell with it
            self.view.apply(failure)
        for rank in set(self._run.ranks) - self._reported:
            self.view.apply(StateChange(rank, "failed", time.time()))
        state: State = "finished" if error is None else "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        self.view.apply(StateChange(None, state, time.time()))
        self._is_over = True


def _facts(glance: RankSummary) -> list[Fact]:
    """What a rank said of its training."""
    facts = (glance.first_step, glance.steps, glance.memory, glance.profile, glance.requested_profile)
    return [*glance.knobs.values(), *(fact for fact in facts if fact is not None)]


class CellOutput:
    """
    The front end of a session's cell: as text, or in a `panel`; and in the end the values of its last expression, as text.

    >>> output = CellOutput.of(session, run, TextSink, cursor=0)
    >>> while not run.done: output.refresh()
    >>> output.closed(results_of(run.ends))
    """

    def __init__(
        self, watch: CellHandle, text: TextFrontEnd, panel: FrontEnd | None = None, *, background: bool = False
    ) -> None:
        self._watch, self._text, self._display = watch, text, panel or text
        # a panel in the background draws by itself
        self._draws = panel is None or not background
        if self._draws:
            self._display.opened(watch)
        else:
            self._display.follow(watch)

    @classmethod
    def of(
        cls,
        session: Session,
        run: CellRun,
        new_sink: Callable[[], TextSink],
        cursor: int,
        displays: Literal["main", "all"] = "main",
        panel: FrontEnd | None = None,
        *,
        background: bool = False,
    ) -> CellOutput:
        """
        The front end of a session's cell that begins at `cursor` of the session's output.

        Figures and tables are shown of the cell's first rank, or with `displays="all"` of every rank.
        """
        template = session.config.launching.log_line_prefix_template
        text = TextFrontEnd(new_sink, template, only_ranks=run.ranks, cell_displays=displays)
        return cls(CellHandle(run, cursor), text, panel, background=background)

    @property
    def cursor(self) -> int:
        """Where in the session's output the cell ended."""
        return self._watch.cursor

    @property
    def shows_failure(self) -> bool:
        """Whether a person sees the cell's failure in it."""
        return self._display.shows_failure

    def refresh(self) -> None:
        """Draw what is new."""
        self._watch.follow()
        if self._draws:
            self._display.refresh()

    def closed(self, results: Iterable[Display] = ()) -> None:
        """Draw the last: the cell has run; `results` are the values of its last expression."""
        self._watch.follow()
        if self._draws:
            self._display.closed()
        self._text.put(self._watch, results)


def results_of(ends: Iterable[CellResult]) -> list[Display]:
    """The values of a cell's last expression, of those ranks where it has one."""
    return [Display(end.rank, end.result, dict(end.metadata), time.time()) for end in ends if end.result is not None]
