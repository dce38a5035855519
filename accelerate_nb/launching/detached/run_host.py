"""The process of a detached run, which outlives the one that starts it: it conducts the run, and serves those who attach."""

import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

from accelerate_nb.config.environment import USE_CPU
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.errors import AccelerateNbError, LaunchError
from accelerate_nb.events.run_folder import hold_lock, status_of
from accelerate_nb.events.run_reader import kept_run
from accelerate_nb.launching.conductor import Conductor
from accelerate_nb.launching.detached.control import ControlServer, RemoteConductor
from accelerate_nb.launching.detached.saved_outcome import SavedOutcomes, error_class, error_kind
from accelerate_nb.launching.end_signals import end_on_signals, exit_code_after
from accelerate_nb.launching.engines import supervisor
from accelerate_nb.launching.engines.supervisor import SupervisorOffer
from accelerate_nb.launching.launcher import RunRequest, conductor_of, meet_nodes, request
from accelerate_nb.launching.nodes.joined_machines import take_over
from accelerate_nb.launching.nodes.node_pool import HandedMachine
from accelerate_nb.launching.nodes.rendezvous import RendezvousSettings
from accelerate_nb.launching.nodes.run_nodes import find_nodes
from accelerate_nb.launching.planning.placement import devices_of
from accelerate_nb.transport.channel import Channel, blocking_pair
from accelerate_nb.transport.memory_file import memory_file, read_entries, write_entries
from accelerate_nb.transport.messages import LaunchFailed, RunStarted, ShowText
from accelerate_nb.transport.serializer import dump, load
from accelerate_nb.transport.worker_spec import python_command, python_path

# How long a run host may take until processes can attach to its run, beside the wait for its nodes.
_START_TIMEOUT = 60.0
# How often the run's status is brought up to date, for those who only read the folder.
_BETWEEN_STATUS = 2.0
# How old it may become while nothing changes: readers on other hosts see by its age whether this process is there.
_OLDEST_STATUS = 3600.0
# Where the folder could not take the outcome, since its disk is full, it is tried again so often, and for so long.
_BETWEEN_TRIES = 2.0
_LONGEST_TRY = 24 * 3600.0


def launch_detached(
    function: Callable[..., Any], args: Sequence[Any], config: RunConfig, folder: Path | None = None
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
    near, far = blocking_pair()
    offer = None
    try:
        if run_request.placement.start == "supervisor":
            with suppress(OSError):
                offer = supervisor.warm().offer()
        write_entries(descriptor, dump((run_request, offer, machines)))
        payload = run_request.plan.payload
        process = subprocess.Popen(
            [*python_command("accelerate_nb.launching.detached.run_host"), str(descriptor), str(far.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(log := (run_request.folder / "host.log").open("ab")),
            pass_fds=[
                *(descriptor, far.fileno(), *payload.descriptors, *(machine.descriptor for machine in machines)),
                *(() if offer is None else (offer.control, offer.log)),
            ],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
    finally:
        far.close()
        os.close(descriptor)
        if offer is not None:
            os.close(offer.control)
    try:
        process.wait(_START_TIMEOUT)
        _wait_until_ready(near, run_request)
    finally:
        log.close()
        near.close()


def _wait_until_ready(near: socket.socket, run_request: RunRequest) -> None:
    """Show a run host's notices until it is ready; raises what it raised, and `LaunchError` where it does not come to that."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    launching, timeout = run_request.config.launching, _START_TIMEOUT
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


@contextmanager
def hosted(request: RunRequest) -> Iterator[tuple[Conductor, list[int]]]:
    """The conductor of a run, to which others can attach in the block, and the signals that have come."""
    locks = [hold_lock(request.folder)]
    control = ControlServer(request.folder)
    # the job that this process is in, and its node: a process elsewhere reaches the run host by a step of the job
    job = {"slurm_job": "SLURM_JOB_ID", "slurm_node": "SLURMD_NODENAME"}
    devices = devices_of(request.placement, request.plan.process_environment.environ)
    facts = {
        **request.facts,
        **{fact: os.environ[name] for fact, name in job.items() if os.environ.get(name)},
        "detached": True,
        "control": str(control.path),
        "devices": [*devices],
        "results": request.config.launching.results,
        "stop_grace_period": request.config.launching.stop_grace_period,
    }
    run = conductor_of(replace(request, facts=facts), outcomes=SavedOutcomes)
    with end_on_signals(run) as signals, control.serve(run):
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
    seen, written = -1, 0.0
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
        if run.view.changes != seen or is_unlocked or time.monotonic() - written > _OLDEST_STATUS:
            seen, written = run.view.changes, time.monotonic()
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
        if request.config.launching.is_on_each_node:
            request = meet_nodes(request)
        elif request.cluster is not None:
            request.cluster.open()
            placement, nodes = find_nodes(request.config)
            plan = replace(request.plan, size=placement.size, node_sizes=nodes.roster.sizes)
            if placement.cpu:
                environment = plan.process_environment
                environment = replace(environment, environ={**environment.environ, USE_CPU: "true"})
                plan = replace(plan, process_environment=environment)
            request = replace(request, placement=placement, plan=plan, nodes=nodes)
    sys.exit(host(request, offer, launcher))


if __name__ == "__main__":
    main()
