"""Workers forked from this very process."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

from accelerate_nb.launching.engines.children import ChildProcesses
from accelerate_nb.transport.payload import Payload
from accelerate_nb.transport.worker_spec import LocalWorker
from accelerate_nb.worker.main import work


class ForkEngine:
    """Places workers by forking: they inherit everything, so nothing has to travel."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload

    def start(self, processes: Sequence[Sequence[LocalWorker]]) -> ChildProcesses:
        """Fork one process for each sequence of workers."""
        # what is buffered here would be written by every child as well
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return ChildProcesses({self._fork(workers): [worker.rank for worker in workers] for workers in processes})

    def _fork(self, workers: Sequence[LocalWorker]) -> int:
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns of forking a process with threads; it was requested, and the child takes none of their locks
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            work(workers, parent, self._payload)
        return pid
