"""The notebook's session: started at its first cell, kept from cell to cell, started anew for a reason that is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from accelerate_nb.config.fields import settings
from accelerate_nb.config.launching import Launching
from accelerate_nb.config.run import RunConfig
from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.session import Session, check_not_launched
from accelerate_nb.notebook.cells.background import BackgroundCell
from accelerate_nb.notebook.cells.saying import say
from accelerate_nb.notebook.functions import resolved

# What a session follows from the next cell on, as it is: nothing of it is in the workers.
_FOLLOWED = frozenset({"panel", "quiet", "grace", "log_line_prefix_template"})


class Change(NamedTuple):
    """A setting that a session would have to be started anew for."""

    name: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} was {_in_words(self.was)} and is {_in_words(self.now)} now"


@dataclass
class KeptSession:
    """
    At most one session, with what was said of its settings.

    `cursor` is where in the session's view the last cell ended, `background` a cell that runs beside the notebook, `picked`
    gives what a form says of the next session's settings.
    """

    session: Session | None = None
    said: dict[str, Any] = field(default_factory=dict)
    cursor: int = 0
    background: BackgroundCell | None = None
    picked: Callable[[], Mapping[str, Any]] = dict

    def ready(self, said: Mapping[str, Any] | None = None, *, fresh: bool = False) -> Session:
        """The session that these settings ask for: the one that is there, or a new one, of which a line tells why."""
        said = dict(said or {})
        if self.session is None:
            return self._start(said, "")
        if not self.session.alive:
            return self._start({**self.said, **said}, _end_of(self.session))
        changes = list(self._changes(self.session, {key: said[key] for key in said.keys() - _FOLLOWED}))
        if fresh or changes:
            why = "; ".join(map(str, changes)) or "that was asked for"
            self.session.close()
            return self._start({**self.said, **said}, f"The session starts anew ({why}); its variables are gone.")
        if followed := {key: said[key] for key in said.keys() & _FOLLOWED}:
            self.session.adjust(**followed)
            self.said.update(followed)
        return self.session

    def there(self, what: str) -> Session:
        """The session, which must be there for `what`."""
        if self.session is None:
            raise LaunchError(f"{what} was asked for, and there is no session. A cell with %%accelerate starts one.")
        if not self.session.alive:
            raise LaunchError(
                f"{what} was asked for. {_end_of(self.session)} The next %%accelerate cell starts a new one."
            )
        return self.session

    def stop(self) -> bool:
        """End the session; whether there was one."""
        session, self.session = self.session, None
        self.cursor, self.background = 0, None
        if session is None or session.done:
            return False
        session.close()
        return True

    def _start(self, said: dict[str, Any], why: str) -> Session:
        check_not_launched()
        if why:
            say(why)
        self.stop()
        if picked := {name: value for name, value in self.picked().items() if name not in said}:
            say(f"The form says: {', '.join(f'{name}={value}' for name, value in picked.items())}.")
            said = {**picked, **said}
        began = time.monotonic()
        self.session = Session.start(resolved(said, None))
        self.said = said
        say(f"{_count(self.session.size)} ready after {time.monotonic() - began:.1f} s: {self.session.why}")
        return self.session

    @staticmethod
    def _changes(session: Session, said: Mapping[str, Any]) -> Iterator[Change]:
        for name, now in said.items():
            was = session.size if name == "num_processes" else _value(session.config, name)
            if was != now:
                yield Change(name, was, now)


def _in_words(value: Any) -> str:
    return "not set" if value is None else str(value)


def _value(config: RunConfig, name: str) -> Any:
    of_launching = name in {one.name for one in settings(Launching)}
    return getattr(config.launching if of_launching else config.training, name)


def _end_of(session: Session) -> str:
    """That a session has ended, and why."""
    why = str(session.error).partition("\n")[0] if session.error is not None else "it was stopped"
    return f"The session has ended, and its variables are gone: {why.rstrip('.')}."


def _count(size: int) -> str:
    return "1 process is" if size == 1 else f"{size} processes are"
