"""The notebook's session: started at its first cell, kept from cell to cell, restarted with a printed reason."""

import contextvars
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.settings import settings
from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.run import Run
from accelerate_nb.launching.session import Session
from accelerate_nb.notebook.api import resolved
from accelerate_nb.notebook.cells.cell_output import CellOutput
from accelerate_nb.notebook.display.text_output import print_message

# What a session follows from the next cell on, as it is: nothing of it is in the workers.
_FOLLOWED = frozenset(
    {"name", "tags", "panel", "report", "hang_warning_after", "stop_grace_period", "log_line_prefix_template"}
)

_OF_LAUNCHING = frozenset(setting.name for setting in settings(LaunchingConfig))
# Seconds of waiting without a message.
_SOON = 0.5


@dataclass
class NotebookSession:
    """At most one session, with its given settings, and a cell that runs beside the notebook."""

    session: Session | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    background: Run | None = None
    background_output: CellOutput | None = None
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
        changes, config = [], self.session.config
        for name in [name for name in settings if name not in _FOLLOWED]:
            now, of_launching = settings[name], name in _OF_LAUNCHING
            was = getattr(config.launching if of_launching else config.training, name)
            was = self.session.size if name == "num_processes" else was
            if was != now:
                was, now = ("not set" if value is None else value for value in (was, now))
                changes.append(f"{name} was {was} and is {now} now")
        if restart or changes:
            why = "; ".join(changes) or "as requested"
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
        session, self.session, self.background, self.background_output = self.session, None, None, None
        if session is None or session.done:
            return False
        session.close()
        return True

    def _start(self, settings: dict[str, Any], why: str) -> Session:
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
        # ipykernel knows the cell by the context
        timer = threading.Timer(_SOON, contextvars.copy_context().run, (print_message, f"starting {what}…"))
        timer.start()
        try:
            self.session = Session.start(config)
        finally:
            timer.cancel()
        self.settings = settings
        ready = "1 process is ready" if self.session.size == 1 else f"{self.session.size} processes are ready"
        print_message(f"{ready} after {time.monotonic() - began:.1f} s: {self.session.why}")
        return self.session


def _end_of(session: Session) -> str:
    """A sentence on the end of a session, and its cause."""
    why = str(session.error).partition("\n")[0] if session.error is not None else "it was stopped"
    return f"The session has ended, and its variables are gone: {why.rstrip('.')}."
