"""The start of a run host: a process in a session of its own, which outlives the one that starts it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.errors import LaunchError
from accelerate_nb.events.run_reader import kept_run
from accelerate_nb.launching.detached.remote_conductor import RemoteConductor
from accelerate_nb.launching.detached.saved_outcome import error_class
from accelerate_nb.launching.engines import supervisor
from accelerate_nb.launching.launcher import RunRequest, request
from accelerate_nb.launching.nodes.node_engine import HandedMachine
from accelerate_nb.launching.nodes.rendezvous_settings import RendezvousSettings
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
    """
    The conductor, in another process, of a run of `function(*args)` that outlives this one; it has begun, and `start` follows it.

    `folder` is the run's own, where it is there already.
    """
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    wanted = request(function, args, config, folder)
    try:
        start_run_host(wanted)
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


def start_run_host(run_request: RunRequest) -> None:
    """Start a run host, which takes over the payload, and machines that joined this process; returns when processes can attach to the run."""
    nodes = run_request.nodes
    with closing(run_request.plan.payload), nullcontext(()) if nodes is None else nodes.handed_over() as machines:
        _start(run_request, machines)


def _start(run_request: RunRequest, machines: Sequence[HandedMachine]) -> None:
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


def _waits(run_request: RunRequest) -> float:
    """How long a run host waits for others before it can begin, in seconds."""
    launching = run_request.config.launching
    if launching.is_on_each_node:
        return RendezvousSettings.of(launching).timeout
    # a cluster's room, and then its agents
    return 2 * launching.join_timeout if run_request.cluster is not None else 0.0


def _is_ready(host: Channel, timeout: float) -> bool:
    """
    Show a run host's notices until it is ready; whether it is, rather than having ended without a word.

    Raises what it raised, and `TimeoutError` where nothing comes from it for `timeout` seconds.
    """
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    while (received := host.receive(timeout)) is not None:
        match received.message:
            case RunStarted():
                return True
            case ShowText(text):
                sys.stderr.write(text)
                sys.stderr.flush()
            case LaunchFailed(kind, text):
                raise error_class(kind)(text)
            case _:
                host.refuse(received)
    return False


def _wait_until_ready(near: socket.socket, run_request: RunRequest) -> None:
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    timeout = _TIMEOUT + _waits(run_request)
    try:
        if _is_ready(Channel(near), timeout):
            return
        reason = "ended"
    except TimeoutError:
        reason = f"was not ready after {timeout:g} s"
    log = (run_request.folder / "host.log").read_text(errors="replace")[-2000:].strip()
    raise LaunchError(
        f"{run_request.name} was to be run by a process that outlives this one, but that process {reason}. It printed:\n{log}\n"
        "Leave detach out to run it from here."
    )
