"""The traces of profiles that ranks wrote on other machines, fetched into the run's folder."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from accelerate_nb.events.model import StepProfile
from accelerate_nb.launching.node_agent.file_parts import ReadPart, fetched

# A trace that is larger or takes longer stays on its node; so do those beyond the other limit, of a run.
_MOST_BYTES, _MOST_SECONDS = 64 << 20, 60.0
_MOST_BYTES_OF_A_RUN = 512 << 20
# The end of an attempt waits so long for them.
_MOST_SECONDS_AT_END = 5.0


class _WantedTrace(NamedTuple):
    profile: StepProfile
    folder: Path
    take: Callable[[StepProfile], None]


class FetchedTraces:
    """
    Fetches traces one after the other, in a thread of its own while there are any.

    >>> traces.note(profile.trace, read)
    >>> traces.fetch(profile, run.folder, take)
    """

    def __init__(self) -> None:
        self._readers: dict[str, ReadPart] = {}
        self._wanted: deque[_WantedTrace] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._left = _MOST_BYTES_OF_A_RUN

    def note(self, trace: str, read: ReadPart) -> None:
        """Note that a trace is on another machine, where `read` reads it."""
        self._readers[trace] = read

    def fetch(self, profile: StepProfile, folder: Path, take: Callable[[StepProfile], None]) -> None:
        """Fetch the trace of a profile into a folder where it is on another machine; `take` gets the profile with its new path."""
        # a node may share the folder
        if profile.trace not in self._readers or Path(profile.trace).parent == folder:
            return
        with self._lock:
            self._wanted.append(_WantedTrace(profile, folder, take))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="accelerate_nb traces", daemon=True)
                self._thread.start()

    def finish(self) -> None:
        """Wait a moment for those that are on their way."""
        if (thread := self._thread) is not None:
            thread.join(_MOST_SECONDS_AT_END)

    def _work(self) -> None:
        while (wanted := self._next()) is not None:
            path = wanted.folder / Path(wanted.profile.trace).name
            part = path.with_name(f"{path.name}.part")
            read = self._readers.pop(wanted.profile.trace)
            with suppress(OSError):
                if fetched(part, read, min(_MOST_BYTES, self._left), time.monotonic() + _MOST_SECONDS):
                    self._left -= part.stat().st_size
                    os.replace(part, path)
                    wanted.take(structs.replace(wanted.profile, trace=str(path)))
            part.unlink(missing_ok=True)

    def _next(self) -> _WantedTrace | None:
        with self._lock:
            if self._wanted:
                return self._wanted.popleft()
            self._thread = None
            return None
