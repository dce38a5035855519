"""The thread that looks once a second how busy the machine is, and each rank of a run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType

from accelerate_nb.devices.gauges import Gauge, Ranks
from accelerate_nb.devices.gauging import gauge_of
from accelerate_nb.devices.sampling import HostGauge
from accelerate_nb.events.view import RunView

_BETWEEN = 1.0
# Where there are thousands of processes a look takes longer; it never takes more than this part of a core.
_PART = 0.01
# A run from which nothing else has come for a while, such as a session that nobody uses, is looked at less often.
_RESTS_AFTER = 60.0
_BETWEEN_AT_REST = 5.0


class Sampler:
    """
    While its block runs, what a view knows of the machine and of its ranks is as of about a second ago.

    Samples go to the view alone: they are no sign of life of any rank, and would fill the run's folder. `kind` is what ranks
    compute on, "cpu" or torch's name for an accelerator; of some kinds nothing is known.

    >>> with Sampler(view, 2, "cpu", {}, [folder]):
    ...     ...
    """

    def __init__(
        self, view: RunView, size: int, kind: str, environment: Mapping[str, str], folders: list[Path]
    ) -> None:
        self._view, self._size, self._kind = view, size, kind
        self._environment, self._folders = dict(environment), folders
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="accelerate_nb samples", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        # a driver that does not answer keeps nobody waiting
        self._thread.join(_BETWEEN)

    def _look(self) -> None:
        # a run that is over by then is not looked at, and pays for no gauge; what one measures begins when it is made
        if self._over.wait(_BETWEEN / 2):
            return
        host, gauge = HostGauge(self._folders), gauge_of(self._kind, self._size, self._environment)
        with closing(gauge):
            if self._over.wait(_BETWEEN / 2):
                return
            patience, seen, moved = 0.0, -1, time.monotonic()
            while not self._over.wait(patience):
                began = time.thread_time()
                if self._view.changes != seen:
                    moved = time.monotonic()
                self._sample(host, gauge)
                seen = self._view.changes
                rests = time.monotonic() - moved > _RESTS_AFTER
                patience = max(_BETWEEN_AT_REST if rests else _BETWEEN, (time.thread_time() - began) / _PART)

    def _sample(self, host: HostGauge, gauge: Gauge) -> None:
        now = time.time()
        self._view.apply(host.sample())
        for sample in gauge.samples(Ranks(self._size, self._pids(), host.memory()[1]), now):
            self._view.apply(sample)

    def _pids(self) -> dict[int, int]:
        """The processes of ranks that run; a rank in this very process says none, and runs from the first moment."""
        here = os.getpid()
        return {
            one.rank: int(one.detail) if one.detail.isdecimal() else here
            for one in self._view.glances()
            if one.state == "running" or (one.state == "starting" and one.detail.isdecimal())
        }
