"""The notebook's session: started at its first cell, kept from cell to cell, restarted with a printed reason; and what its cells show."""

import contextvars
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.magic_args import ADJUSTABLE_SETTINGS
from accelerate_nb.config.rank_lists import of_ranks
from accelerate_nb.config.settings import settings
from accelerate_nb.errors import LaunchError
from accelerate_nb.events.event_types import Display
from accelerate_nb.launching.run import FrontEnd, Run, keep_drawing
from accelerate_nb.launching.session import CellResult, Session
from accelerate_nb.notebook.api import resolved
from accelerate_nb.notebook.display.text import TextFrontEnd
from accelerate_nb.notebook.display.text_output import LabelledLine, TextSink, print_message
from accelerate_nb.reports.text_format import counted

_OF_LAUNCHING = frozenset(setting.name for setting in settings(LaunchingConfig))
# Seconds of waiting without a message.
_SOON = 0.5
# The seconds for the last lines of a cell that draws by itself, which a wait for it leaves to the cell.
_LAST_DRAWING = 10.0


class CellOutput(FrontEnd):
    """The front end of a session's cell: text, or a `panel`; and in the end the values of its last expression, as text."""

    def __init__(
        self,
        new_sink: Callable[[], TextSink],
        ranks: Sequence[int],
        prefix_template: str | None = None,
        displays: Literal["main", "all"] = "main",
        panel: FrontEnd | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._new_sink = new_sink
        self._text = TextFrontEnd(new_sink, prefix_template, only_ranks=ranks, cell_displays=displays, clock=clock)
        self._display: FrontEnd = panel or self._text
        self._run: Run | None = None
        self._drawing: threading.Thread | None = None

    @property
    def shows_failure(self) -> bool:
        """Whether a person sees the cell's failure in it."""
        return self._display.shows_failure

    def opened(self, run: Run) -> None:
        """The running cell waits for this one from now on."""
        if self._drawing is None:
            self._run = run
            self._display.opened(run)

    def refresh(self) -> None:
        """Draw what is new."""
        if self._drawing is None:
            self._display.refresh()

    def closed(self) -> None:
        """Draw the last, and the values of the last expression."""
        if self._drawing is None:
            self._close()
        elif self._run is not None and self._run.done:
            self._drawing.join(_LAST_DRAWING)

    def follow(self, run: Run) -> None:
        """Show the cell under the one that runs at this moment, until it is over; returns at once."""
        self._run, sink = run, self._new_sink()
        draws_by_itself = self._display is not self._text
        if draws_by_itself:
            self._display.follow(run)
        else:
            self._display.opened(run)

        def closed() -> None:
            self._close(draws=not draws_by_itself)
            if run.error is not None and not self.shows_failure:
                text = f"{type(run.error).__name__}: {run.error}"
                sink.write([LabelledLine("stderr", line, "error") for line in text.splitlines()])

        refresh = (lambda: None) if draws_by_itself else self._display.refresh
        self._drawing = keep_drawing(run, refresh, closed)

    def show(self, run: Run) -> None:
        """Show in a line where the cell runs, or how it went."""
        where = of_ranks(run.ranks)
        text = f"<{run.name} runs on {where} in the background: .wait(), .interrupt(), %accelerate status>"
        if run.done:
            how = "has run" if run.error is None else f"stopped with {type(run.error).__name__}"
            text = f"<{run.name} {how} on {where}: {run.seconds:.1f} s>"
        self._new_sink().show({"text/plain": text}, {})

    def _close(self, *, draws: bool = True) -> None:
        if draws:
            self._display.closed()
        if self._run is not None:
            ends = (end for end in self._run.rank_results if isinstance(end, CellResult))
            now = time.time()
            self._text.put(
                self._run, [Display(end.rank, end.result, dict(end.metadata), now) for end in ends if end.result]
            )


@dataclass
class NotebookSession:
    """At most one session, with the flags of its cells, and a cell that runs beside the notebook."""

    session: Session | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    # what the form held when the session started
    form: dict[str, Any] = field(default_factory=dict)
    background: Run | None = None
    background_output: CellOutput | None = None
    picked: Callable[[], Mapping[str, Any]] = dict

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the session was given; a flag wins over the form."""
        return {**self.form, **self.flags}

    def ready(self, settings: Mapping[str, Any] | None = None, *, restart: bool = False) -> Session:
        """A session with these settings: the current one, or a new one, with a printed reason."""
        settings = dict(settings or {})
        if self.session is None:
            return self._start(settings, "")
        if not self.session.alive:
            # where another machine has ended it, it may still be about to
            self.session.close()
            return self._start(settings, _end_of(self.session), self.flags)
        changes, config = [], self.session.config
        for name in [name for name in settings if name not in ADJUSTABLE_SETTINGS]:
            now, of_launching = settings[name], name in _OF_LAUNCHING
            was = getattr(config.launching if of_launching else config.training, name)
            was = self.session.size if name == "num_processes" else was
            if was != now:
                was, now = ("not set" if value is None else value for value in (was, now))
                changes.append(f"{name} was {was} and is {now} now")
        if restart or changes:
            why = "; ".join(changes) or "as requested"
            self.session.close()
            return self._start(settings, f"The session restarts ({why}); its variables are gone.", self.flags)
        if followed := {key: settings[key] for key in settings.keys() & ADJUSTABLE_SETTINGS}:
            self.session.adjust(**followed)
            self.flags.update(followed)
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
        session, self.session, self.background, self.background_output = self.session, None, None, None
        if session is None or session.done:
            return False
        session.close()
        return True

    def _start(self, settings: Mapping[str, Any], why: str, earlier_flags: Mapping[str, Any] | None = None) -> Session:
        if why:
            print_message(why)
        self.stop()
        form = dict(self.picked())
        # a flag of an earlier cell holds until the form changes its setting
        kept = {name: flag for name, flag in (earlier_flags or {}).items() if form.get(name) == self.form.get(name)}
        flags = {**kept, **settings}
        if picked := [f"{name}={value}" for name, value in form.items() if name not in flags]:
            print_message(f"From the form: {', '.join(picked)}.")
        began = time.monotonic()
        config = resolved({**form, **flags}, None)
        wanted = config.launching.num_processes
        what = "the processes" if wanted is None else counted(wanted, "process")
        # ipykernel knows the cell by the context
        timer = threading.Timer(_SOON, contextvars.copy_context().run, (print_message, f"starting {what}…"))
        timer.start()
        try:
            self.session = Session.start(config)
        finally:
            timer.cancel()
        self.flags, self.form = flags, form
        size = self.session.size
        print_message(
            f"{counted(size, 'process')} {'is' if size == 1 else 'are'} ready after {time.monotonic() - began:.1f} s: {self.session.why}"
        )
        return self.session


def _end_of(session: Session) -> str:
    """A sentence on the end of a session, and its cause."""
    why = str(session.error).partition("\n")[0] if session.error is not None else "it was stopped"
    return f"The session has ended, and its variables are gone: {why.rstrip('.')}."
