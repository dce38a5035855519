"""The way to a run host in a job of SLURM: a step on its node passes on what is sent to its socket."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_nb.launching.detached.control_socket import connect
from accelerate_nb.launching.nodes.slurm_nodes import step_command

_TIMEOUT = 10.0
_AT_ONCE = 1 << 16


def job_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """The job that this process is in, and its node, for the status of a run; nothing outside of a job."""
    names = {"slurm_job": "SLURM_JOB_ID", "slurm_node": "SLURMD_NODENAME"}
    return {fact: environment[name] for fact, name in names.items() if environment.get(name)}


def tunnel_command(status: Mapping[str, Any]) -> list[str]:
    """The command that reaches the run host of a run with this status; none where that is on this machine, or in no job."""
    job, node = status.get("slurm_job"), status.get("slurm_node")
    if status.get("host") == socket.gethostname() or not (job and node) or shutil.which("srun") is None:
        return []
    return step_command(job, node, [sys.executable, "-m", __spec__.name, str(status["control"])])


def main() -> None:
    """Pass on standard input to the socket `sys.argv[1]`, and what comes back to standard output, until one of them ends."""
    sock = connect(Path(sys.argv[1]), _TIMEOUT)
    sock.settimeout(None)

    def pass_on_input() -> None:
        while data := os.read(0, _AT_ONCE):
            sock.sendall(data)
        sock.shutdown(socket.SHUT_RDWR)

    # it ends with this process, also where it waits for more
    threading.Thread(target=pass_on_input, name="accelerate_nb input", daemon=True).start()
    while data := sock.recv(_AT_ONCE):
        while data:
            data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
