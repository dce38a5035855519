"""The start of a run host: a process in a session of its own, which outlives the one that starts it."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.errors import LaunchError
from accelerate_nb.events.run_reader import kept_run
from accelerate_nb.launching.detached.control import RemoteConductor
from accelerate_nb.launching.detached.saved_outcome import error_class
from accelerate_nb.launching.engines import supervisor
from accelerate_nb.launching.launcher import RunRequest, request
from accelerate_nb.launching.nodes.node_engine import HandedMachine
from accelerate_nb.launching.nodes.rendezvous import RendezvousSettings
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.memory_file import memory_file, write_entries
from accelerate_nb.transport.messages import LaunchFailed, RunStarted, ShowText
from accelerate_nb.transport.serializer import dump

_TIMEOUT = 60.0


def launch_detached(
    function: Callable[..., Any],
    args: Sequence[Any],
    config: RunConfig,
    folder: Path | None = None,
) -> RemoteConductor:
    """The conductor, in another process, of a run that outlives this one, and has begun; `start` follows it."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    wanted = request(function, args, config, folder)
    try:
        with closing(wanted.plan.payload), wanted.nodes.handed_over() as machines:
            _start_run_host(wanted, machines)
    except BaseException:
        if folder is None and kept_run(wanted.folder) is None:
            # a launch that fails leaves nothing
            shutil.rmtree(wanted.folder, ignore_errors=True)
        raise
    saved = kept_run(wanted.folder)
    if saved is None:
        raise LaunchError(
            f"{wanted.name} was launched detached, and its folder {wanted.folder} was removed: the run ends."
        )
    return RemoteConductor(saved)


def _start_run_host(run_request: RunRequest, machines: Sequence[HandedMachine]) -> None:
    """Start a run host, which takes over the payload, and machines that joined this process; returns when processes can attach to the run."""
    descriptor = memory_file("accelerate_nb_request")
    near, far = socket.socketpair()
    offer = None
    try:
        if run_request.placement.start == "supervisor":
            with suppress(OSError):
                offer = supervisor.warm().offer()
        write_entries(descriptor, dump((run_request, offer, machines)))
        payload = run_request.plan.payload
        process = subprocess.Popen(
            [sys.executable, "-m", "accelerate_nb.launching.detached.run_host", str(descriptor), str(far.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(log := (run_request.folder / "host.log").open("ab")),
            pass_fds=[
                *(descriptor, far.fileno(), *payload.descriptors, *(machine.descriptor for machine in machines)),
                *(() if offer is None else (offer.control, offer.log)),
            ],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    finally:
        far.close()
        os.close(descriptor)
        if offer is not None:
            os.close(offer.control)
    try:
        process.wait(_TIMEOUT)
        _wait_until_ready(near, run_request)
    finally:
        log.close()
        near.close()


def _wait_until_ready(near: socket.socket, run_request: RunRequest) -> None:
    """Show a run host's notices until it is ready; raises what it raised, and `LaunchError` where it does not come to that."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    launching, timeout = run_request.config.launching, _TIMEOUT
    if launching.is_on_each_node:
        timeout += RendezvousSettings.of(launching).timeout
    elif run_request.cluster is not None:
        # a cluster's room, and then its agents
        timeout += 2 * launching.join_timeout
    host, reason = Channel(near), "ended"
    try:
        while (received := host.receive(timeout)) is not None:
            match received.message:
                case RunStarted():
                    return
                case ShowText(text):
                    sys.stderr.write(text)
                    sys.stderr.flush()
                case LaunchFailed(kind, text):
                    raise error_class(kind)(text)
                case _:
                    host.refuse(received)
    except TimeoutError:
        reason = f"was not ready after {timeout:g} s"
    log = (run_request.folder / "host.log").read_text(errors="replace")[-2000:].strip()
    raise LaunchError(
        f"{run_request.name} was to be run by a process that outlives this one, but that process {reason}. It printed:\n{log}\n"
        "Leave detach out to run it from here."
    )
