"""Workers forked from this very process."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

from accelerate_nb.launching.engines.children import ChildProcesses
from accelerate_nb.transport.payload import Payload
from accelerate_nb.transport.worker_spec import WorkerSpec
from accelerate_nb.worker.main import work


class ForkEngine:
    """Places workers by forking: they inherit everything, so nothing has to travel."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload

    def start(self, specs: Sequence[Sequence[WorkerSpec]]) -> ChildProcesses:
        """Fork one process for each sequence of worker specs."""
        # what is buffered here would be written by every child as well
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return ChildProcesses(
            {self._fork(process_specs): [spec.rank_info.rank for spec in process_specs] for process_specs in specs}
        )

    def _fork(self, specs: Sequence[WorkerSpec]) -> int:
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns of forking a process with threads; it was requested, and the child takes none of their locks
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            work(specs, parent, self._payload)
        return pid
