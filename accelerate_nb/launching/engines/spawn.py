"""Workers that start as fresh Pythons."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from accelerate_nb.launching.engines.children import ChildProcesses
from accelerate_nb.transport.channel import frame
from accelerate_nb.transport.messages import BeginWorker
from accelerate_nb.transport.worker_spec import WorkerSpec, as_text


class SpawnEngine:
    """Places workers by starting one new interpreter each; nothing of this process is in them."""

    def start(self, specs: Sequence[Sequence[WorkerSpec]]) -> ChildProcesses:
        """Start one interpreter for each sequence of worker specs."""
        return ChildProcesses(
            {_spawn(process_specs): [spec.rank_info.rank for spec in process_specs] for process_specs in specs}
        )


def _spawn(specs: Sequence[WorkerSpec]) -> int:
    spec_reader, spec_writer = os.pipe()
    environ = {**specs[0].process_environment.environ, **specs[0].rank_info.environ()}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    descriptors = [descriptor for spec in specs for descriptor in spec.descriptors.all()]
    with os.fdopen(spec_writer, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "accelerate_nb.worker.main", str(spec_reader)],
            stdin=subprocess.DEVNULL,
            pass_fds=[spec_reader, *descriptors],
            start_new_session=True,
            env=environ,
        )
        os.close(spec_reader)
        file.write(frame(BeginWorker(as_text(specs))))
    # the process is waited for by its number, and Popen must not do it too when it is collected
    process.returncode = 0
    return process.pid
