"""The process of a detached run: it conducts the run, keeps its outcome, and serves those who attach."""

import io
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from typing import NoReturn, TextIO

from accelerate_nb.config.environment import USE_CPU
from accelerate_nb.errors import AccelerateNbError, LaunchError
from accelerate_nb.events.run_folder import hold_lock, status_of
from accelerate_nb.launching.conductor import Conductor
from accelerate_nb.launching.detached.control import ControlServer, ControlSocket, job_facts
from accelerate_nb.launching.detached.saved_outcome import SavedOutcomes, error_kind
from accelerate_nb.launching.end_signals import end_on_signals, exit_code_after
from accelerate_nb.launching.engines import supervisor
from accelerate_nb.launching.engines.supervisor import SupervisorOffer
from accelerate_nb.launching.launcher import RunRequest, conductor_of, meet_nodes
from accelerate_nb.launching.nodes.joined_machines import take_over
from accelerate_nb.launching.nodes.node_engine import HandedMachine
from accelerate_nb.launching.nodes.run_nodes import find_nodes
from accelerate_nb.launching.planning.placement import devices_of
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.memory_file import read_entries
from accelerate_nb.transport.messages import LaunchFailed, RunStarted, ShowText
from accelerate_nb.transport.serializer import load

# How often the run's status is brought up to date, for those who only read the folder.
_BETWEEN_STATUS = 2.0
# Where the folder could not take the outcome, since its disk is full, it is tried again so often, and for so long.
_BETWEEN_TRIES = 2.0
_LONGEST_TRY = 24 * 3600.0


@contextmanager
def hosted(request: RunRequest) -> Iterator[tuple[Conductor, list[int]]]:
    """The conductor of a run, to which others can attach in the block, and the signals that have come."""
    locks = [hold_lock(request.folder)]
    control = ControlSocket(request.folder)
    devices = devices_of(request.placement, request.plan.process_environment.environ)
    facts = {
        **request.facts,
        **job_facts(os.environ),
        "detached": True,
        "control": str(control.path),
        "devices": [*devices],
        "results": request.config.launching.results,
        "stop_grace_period": request.config.launching.stop_grace_period,
    }
    run = conductor_of(replace(request, facts=facts), outcomes=SavedOutcomes)
    with end_on_signals(run) as signals, ControlServer(control, run):
        run.update_status()
        threading.Thread(target=_keep_status, args=(run, locks), name="accelerate_nb status", daemon=True).start()
        yield run, signals
        # what the folder could not take is tried again, as long as it is there and no signal has come
        deadline, known, is_kept = time.monotonic() + _LONGEST_TRY, len(signals), run.trouble is None
        while not is_kept and run.facts.folder.is_dir() and len(signals) == known and time.monotonic() < deadline:
            time.sleep(_BETWEEN_TRIES)
            is_kept = run.finish_again()
    for lock in locks:
        os.close(lock)


class _NoticeStream(io.TextIOBase):
    """Sends what is written to the process that waits, and writes it into the log where none does."""

    def __init__(self, launcher: Channel, log: TextIO) -> None:
        self._launcher, self._log = launcher, log

    def write(self, text: str) -> int:
        """Send a text, or write it."""
        return len(text) if self._launcher.try_send(ShowText(text)) else self._log.write(text)


@contextmanager
def reported_start(sock: socket.socket) -> Iterator[Channel]:
    """Inside the block, notices and errors go to the launcher, without which this process ends; its channel."""
    launcher = Channel(sock)
    over = threading.Event()

    def end_with_launcher() -> None:
        if launcher.receive() is None and not over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    # an exit by the way of Python: what was started in the block is ended first
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    watch = threading.Thread(target=end_with_launcher, name="accelerate_nb launcher", daemon=True)
    watch.start()
    try:
        with redirect_stderr(_NoticeStream(launcher, sys.stderr)):
            yield launcher
    except AccelerateNbError as error:
        launcher.try_send(LaunchFailed(error_kind(error), str(error)))
        raise
    finally:
        over.set()
        # ends the thread that reads; this end can still send
        sock.shutdown(socket.SHUT_RD)
        watch.join()


def host(request: RunRequest, offer: SupervisorOffer | None, launcher: Channel) -> int:
    """Conduct a run to its end; `launcher` learns when others can attach. Returns this process's exit code."""
    with hosted(request) as (run, signals):
        if not status_of(request.folder):
            error = LaunchError(
                f"{request.name} was to be launched detached, and nothing can be written into {request.folder}: is its disk full? Name "
                "another folder: folder='PATH', or the variable ACCELERATE_NB_FOLDER."
            )
            launcher.try_send(LaunchFailed(error_kind(error), str(error)))
            raise error
        # raises where nobody waits for it any more
        launcher.send(RunStarted())
        launcher.close()
        if offer is not None:
            supervisor.adopt(offer)
        # from this thread, which lasts as long as the process: a supervisor that is started here ends with it
        supervisor.warm(request.config.launching.supervisor_idle_timeout)
        run.start()
        run.over.wait()
    supervisor.cool()
    return exit_code_after(signals, run.stopped_at) or 0


def _keep_status(run: Conductor, locks: list[int]) -> None:
    """Keep the status up to date, and the lock in place; where the run's folder was removed, the run is stopped."""
    seen = -1
    while not run.over.wait(_BETWEEN_STATUS):
        if not run.facts.folder.is_dir():
            sys.stderr.write(
                f"{run.facts.name} is stopped: its folder {run.facts.folder} was removed while it ran, and nothing of it can be kept.\n"
            )
            sys.stderr.flush()
            run.request_stop("finish")
            return
        is_unlocked = os.fstat(locks[-1]).st_nlink == 0
        if is_unlocked:
            locks.append(hold_lock(run.facts.folder))
        if run.view.changes != seen or is_unlocked:
            seen = run.view.changes
            run.update_status()


def main() -> NoReturn:
    """Begin: `python -m accelerate_nb.launching.detached.run_host REQUEST LAUNCHER`, the numbers of two descriptors."""
    descriptor, sock = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    # a child of nobody: whoever ends the launching process with all of its children does not find it
    if os.fork():
        os._exit(0)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    request: RunRequest
    offer: SupervisorOffer | None
    machines: tuple[HandedMachine, ...]
    request, offer, machines = load(read_entries(descriptor))
    os.close(descriptor)
    take_over(machines)
    # what this process prints goes into a file: the terminal or the kernel may be gone
    log = os.open(request.folder / "host.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    with reported_start(sock) as launcher:
        request = _with_nodes(request)
    sys.exit(host(request, offer, launcher))


def _with_nodes(request: RunRequest) -> RunRequest:
    """The request with its nodes, which this process finds where it has to; raises `LaunchError`."""
    if request.config.launching.is_on_each_node:
        return meet_nodes(request)
    if request.cluster is None:
        return request
    request.cluster.open()
    placement, nodes = find_nodes(request.config)
    environment = request.plan.process_environment
    if placement.cpu:
        environment = replace(environment, environ={**environment.environ, USE_CPU: "true"})
    plan = replace(request.plan, size=placement.size, node_sizes=nodes.roster.sizes, process_environment=environment)
    return replace(request, placement=placement, plan=plan, nodes=nodes)


if __name__ == "__main__":
    main()
