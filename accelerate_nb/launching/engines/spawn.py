"""Workers that start as fresh Pythons."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from accelerate_nb.launching.engines.children import ChildProcesses
from accelerate_nb.transport.channel import frame
from accelerate_nb.transport.messages import BeginWorker
from accelerate_nb.transport.worker_spec import LocalWorker, descriptors_of


class SpawnEngine:
    """Places workers by starting one new interpreter each; nothing of this process is in them."""

    def start(self, processes: Sequence[Sequence[LocalWorker]]) -> ChildProcesses:
        """Start one interpreter for each sequence of workers."""
        return ChildProcesses({_spawn(workers): [worker.rank for worker in workers] for workers in processes})


def _spawn(workers: Sequence[LocalWorker]) -> int:
    reader, writer = os.pipe()
    spec, descriptors = workers[0].spec, descriptors_of(workers)
    environ = {**spec.process_environment.environ, **spec.rank_info.environ()}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with os.fdopen(writer, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "accelerate_nb.worker.main", str(reader)],
            stdin=subprocess.DEVNULL,
            pass_fds=[reader, *descriptors],
            start_new_session=True,
            env=environ,
        )
        os.close(reader)
        file.write(frame(BeginWorker(tuple(workers)), len(descriptors)))
    # the process is waited for by its number, and Popen must not do it too when it is collected
    process.returncode = 0
    return process.pid
