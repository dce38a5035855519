"""The notebook's session: started at its first cell, kept from cell to cell, restarted with a printed reason; and cells that run beside the notebook."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.rank_lists import of_ranks
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.config.settings import settings
from accelerate_nb.errors import LaunchError, mark_in_panel
from accelerate_nb.launching.run import keep_drawing
from accelerate_nb.launching.session.cell_run import CellResult, CellRun
from accelerate_nb.launching.session.session import Session, check_not_launched
from accelerate_nb.notebook.api import resolved
from accelerate_nb.notebook.cells.cell_output import CellOutput, results_of
from accelerate_nb.notebook.display.text_output import LabelledLine, TextSink, print_message

_POLL_INTERVAL = 0.05


class BackgroundCell:
    """
    A background cell, as `%%accelerate --background` returns it. Its output continues under its cell.

    >>> cell = _
    >>> cell.wait()
    """

    def __init__(self, run: CellRun, output: CellOutput, screen: TextSink, ended: Callable[[], None]) -> None:
        self._run, self._output, self._screen, self._ended = run, output, screen, ended
        self._drawing: threading.Thread | None = None

    def follow(self) -> BackgroundCell:
        """Show its output under the cell that runs at this moment; returns at once."""
        self._drawing = keep_drawing(self, self._run)
        return self

    @property
    def name(self) -> str:
        """The name of the cell."""
        return self._run.name

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run it."""
        return self._run.ranks

    @property
    def done(self) -> bool:
        """Whether every rank has run it, and all its output is shown."""
        return self._run.done and not (self._drawing is not None and self._drawing.is_alive())

    @property
    def seconds(self) -> float:
        """The seconds for which it has run, or ran."""
        if not self._run.done:
            return time.time() - self._run.started
        return max((end.seconds for end in self._run.ends), default=0.0)

    def wait(self, timeout: float | None = None) -> tuple[CellResult, ...]:
        """
        Wait until it has run, for at most `timeout` seconds; how each rank ended.

        Raises what a rank raised, and `TimeoutError`. An interrupt ends the waiting: the cell goes on.
        """
        __tracebackhide__ = True  # IPython shows the person's own frames alone
        self.finish(timeout)
        if not self.done:
            raise TimeoutError(f"{self.name} has not ended after {timeout:g} s of waiting. It goes on; wait again.")
        if self._run.error is not None and self._output.shows_failure:
            mark_in_panel(self._run.error)
        return self._run.wait()

    def finish(self, timeout: float | None = None) -> None:
        """Wait until it has run, whatever came of it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = threading.Event()
        while not self.done and (deadline is None or time.monotonic() < deadline):
            pause.wait(_POLL_INTERVAL)

    def interrupt(self) -> None:
        """Interrupt it on every rank; the session goes on."""
        self._run.interrupt()

    def stacks(self) -> str:
        """The current stack of every rank."""
        return self._run.stacks()

    def refresh(self) -> None:
        """Draw what is new."""
        self._output.refresh()

    def closed(self) -> None:
        """Draw the last, and what became of it."""
        self._output.closed(results_of(self._run.ends))
        self._ended()
        if (error := self._run.error) is not None and not self._output.shows_failure:
            text = f"{type(error).__name__}: {error}"
            self._screen.write([LabelledLine("stderr", line, "error") for line in text.splitlines()])

    def __repr__(self) -> str:
        where = of_ranks(self.ranks)
        if not self._run.done:
            return f"<{self.name} runs on {where} in the background: .wait(), .interrupt(), %accelerate status>"
        how = "has run" if self._run.error is None else f"stopped with {type(self._run.error).__name__}"
        return f"<{self.name} {how} on {where}: {self.seconds:.1f} s>"


# What a session follows from the next cell on, as it is: nothing of it is in the workers.
_FOLLOWED = frozenset(
    {"name", "tags", "panel", "report", "hang_warning_after", "stop_grace_period", "log_line_prefix_template"}
)

# Seconds of waiting without a message.
_SOON = 0.5


class SettingChange(NamedTuple):
    """A changed setting that needs a restart of the session."""

    name: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} was {_in_words(self.was)} and is {_in_words(self.now)} now"


@dataclass
class NotebookSession:
    """
    At most one session, with its given settings.

    `cursor` is where in the session's view the last cell ended, `background` a cell that runs beside the notebook, `picked`
    gives the settings that a form holds for the next session.
    """

    session: Session | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    cursor: int = 0
    background: BackgroundCell | None = None
    picked: Callable[[], Mapping[str, Any]] = dict

    def ready(self, settings: Mapping[str, Any] | None = None, *, restart: bool = False) -> Session:
        """A session with these settings: the current one, or a new one, with a printed reason."""
        settings = dict(settings or {})
        if self.session is None:
            return self._start(settings, "")
        if not self.session.alive:
            # where another machine has ended it, it may still be about to
            self.session.close()
            return self._start({**self.settings, **settings}, _end_of(self.session))
        changes = list(self._changes(self.session, {key: settings[key] for key in settings.keys() - _FOLLOWED}))
        if restart or changes:
            why = "; ".join(map(str, changes)) or "as requested"
            self.session.close()
            return self._start({**self.settings, **settings}, f"The session restarts ({why}); its variables are gone.")
        if followed := {key: settings[key] for key in settings.keys() & _FOLLOWED}:
            self.session.adjust(**followed)
            self.settings.update(followed)
        return self.session

    def names(self) -> list[str]:
        """The names that the ranks had at their last reply."""
        return [] if self.session is None else list(self.session.names)

    def there(self, what: str) -> Session:
        """The session, which must be there for `what`."""
        if self.session is None:
            raise LaunchError(f"{what} was requested, but there is no session. A cell with %%accelerate starts one.")
        if not self.session.alive:
            end = _end_of(self.session)
            raise LaunchError(f"{what} was requested. {end} The next %%accelerate cell starts a new one.")
        return self.session

    def stop(self) -> bool:
        """End the session; whether there was one."""
        session, self.session = self.session, None
        self.cursor, self.background = 0, None
        if session is None or session.done:
            return False
        session.close()
        return True

    def _start(self, settings: dict[str, Any], why: str) -> Session:
        check_not_launched()
        if why:
            print_message(why)
        self.stop()
        if picked := {name: value for name, value in self.picked().items() if name not in settings}:
            print_message(f"From the form: {', '.join(f'{name}={value}' for name, value in picked.items())}.")
            settings = {**picked, **settings}
        began = time.monotonic()
        config = resolved(settings, None)
        wanted = config.launching.num_processes
        what = "the processes" if wanted is None else "1 process" if wanted == 1 else f"{wanted} processes"
        with _print_if_slow(f"starting {what}…"):
            self.session = Session.start(config)
        self.settings = settings
        ready = "1 process is ready" if self.session.size == 1 else f"{self.session.size} processes are ready"
        print_message(f"{ready} after {time.monotonic() - began:.1f} s: {self.session.why}")
        return self.session

    @staticmethod
    def _changes(session: Session, settings: Mapping[str, Any]) -> Iterator[SettingChange]:
        for name, now in settings.items():
            was = len(session.ranks) if name == "num_processes" else _value(session.config, name)
            if was != now:
                yield SettingChange(name, was, now)


@contextmanager
def _print_if_slow(text: str) -> Iterator[None]:
    """Print a text if the block takes long."""
    context = contextvars.copy_context()  # by which ipykernel knows the cell
    timer = threading.Timer(_SOON, lambda: context.run(print_message, text))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _in_words(value: Any) -> str:
    return "not set" if value is None else str(value)


def _value(config: RunConfig, name: str) -> Any:
    of_launching = name in {setting.name for setting in settings(LaunchingConfig)}
    return getattr(config.launching if of_launching else config.training, name)


def _end_of(session: Session) -> str:
    """A sentence on the end of a session, and its cause."""
    why = str(session.error).partition("\n")[0] if session.error is not None else "it was stopped"
    return f"The session has ended, and its variables are gone: {why.rstrip('.')}."
