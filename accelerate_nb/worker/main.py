"""A worker from its first line to its last: what it does around its function."""

import atexit
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import process, util
from typing import Any, NoReturn

from accelerate_nb.devices.xla import read_environment_again, wake
from accelerate_nb.events.event_codec import EventSender
from accelerate_nb.events.event_types import State, StateChange
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.failures.stack_dumps import SIGNAL
from accelerate_nb.rank import background_tasks, step_profiler
from accelerate_nb.rank.event_sink import connect
from accelerate_nb.sources.installed_packages import loaded_since
from accelerate_nb.transport.channel import message_of
from accelerate_nb.transport.messages import BeginWorker
from accelerate_nb.transport.outcome import failure_of, write_result
from accelerate_nb.transport.payload import Payload, received_payload
from accelerate_nb.transport.serializer import process_shell
from accelerate_nb.transport.spawned_processes import send_main_by_value
from accelerate_nb.transport.worker_spec import LocalWorker
from accelerate_nb.worker import logging_hooks, stdio, tqdm_hook
from accelerate_nb.worker.control_channel import open_inbox
from accelerate_nb.worker.process_group_keys import separate_groups
from accelerate_nb.worker.process_session import die_with_parent, tie_children

# How long what was registered with atexit may take.
_PARTING = 2.0


def work(worker: LocalWorker, parent: int, payload: Payload | None = None) -> NoReturn:
    """Be a worker: run the payload, leave its outcome, wait until all ranks have, and end the process."""
    # those that come before they can be reported
    interrupts: list[int] = []
    try:
        signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        _settle(worker, parent)
        os.environ.update(worker.spec.rank_info.environ())
        rank = RankConnection(worker, payload)
        succeeds = rank.run(interrupts)
        # connections of other ranks end here: it stays until the kernel releases it, or has gone
        with suppress(KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if not rank.is_interrupted:
                rank.channel.leave.wait()
        _part()
        os._exit(0 if succeeds else 1)
    finally:
        # nothing of the process that this one was forked from may run on in here
        os._exit(70)


def _settle(worker: LocalWorker, parent: int) -> None:
    """Become a process of one's own: session, streams, signals, environment."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    die_with_parent(parent)
    tie_children()
    atexit._clear()
    process._children = set()  # type: ignore[attr-defined]  # as multiprocessing's own children do
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    util._run_after_forkers()  # type: ignore[attr-defined]
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    stdio.take_over(worker.descriptors.stdout, worker.descriptors.stderr)
    for descriptor in (worker.descriptors.stdout, worker.descriptors.stderr):
        os.close(descriptor)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Ray blocks it in the threads of its actors, and what they fork inherits that
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # a notebook's kernel has switched it on already, and a forked worker's last words would go to the kernel's streams
    faulthandler.enable(file=worker.descriptors.stacks)
    # the main thread alone, which the signal goes to: other threads run on while their stacks are read, and that ends in a
    # fault of memory before long
    faulthandler.register(SIGNAL, file=worker.descriptors.stacks, all_threads=False, chain=False)
    worker.spec.process_environment.take_over()
    stdio.replace_screen_and_keyboard()
    tqdm_hook.install()
    logging_hooks.install()
    step_profiler.watch_steps()
    send_main_by_value()
    process_shell.set(_shell)


def _shell() -> Any:
    from accelerate_nb.worker.session.shell import current_shell  # loads all of IPython

    return current_shell()


def _part() -> None:
    """Run what was registered for the end, but not for ever."""
    watch = threading.Timer(_PARTING, os._exit, (0,))
    watch.daemon = True
    watch.start()
    try:
        atexit._run_exitfuncs()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    stdio.flush()


class RankConnection:
    """A rank's connection to its kernel, in both directions, from when it is made."""

    def __init__(self, worker: LocalWorker, payload: Payload | None = None) -> None:
        self._worker = worker
        self._payload = payload or received_payload(worker.descriptors.payload, worker.descriptors.more)
        self._before = len(sys.modules)
        self.is_interrupted = False
        # other ranks need the store also after this one's function has returned: it lasts until all have
        self._store: Any = None
        sock = socket.socket(fileno=worker.descriptors.events)
        # what the notebook, or a module, has set for new sockets is not for this one
        sock.settimeout(None)
        self._sender = EventSender(sock, worker.rank)
        connect(self._sender)
        self.channel = open_inbox(sock, worker.descriptors.stacks)
        # from here on it dumps its stack at the signal
        self._send_state("starting")

    def run(self, interrupts: Sequence[int]) -> bool:
        """Call the function, unless there were interrupts, and leave its value or report its failure. Returns whether all went well."""
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if interrupts:
                signal.raise_signal(signal.SIGINT)
            self._prepare()
            call = self._payload.unpack()
            self._send_state("running")
            try:
                value = call()
            finally:
                step_profiler.current_step_profiler().end_function()
            background_tasks.finish()
            is_wanted = self._worker.spec.is_result_wanted
            result = RankResult(self._worker.rank, value, modules=loaded_since(self._before))
            write_result(self._worker.descriptors.outcome, result, is_wanted=is_wanted)
        except BaseException as error:
            self._fail(error)
            return False
        self._note_interrupts()
        # after all that it wrote
        stdio.flush()
        self._send_state("finished")
        return True

    def _prepare(self) -> None:
        spec, store = self._worker.spec, self._worker.descriptors.store
        if store >= 0:
            from torch.distributed import TCPStore

            # of the ranks' rendezvous, on the listening socket that was bound before any of them started
            self._store = TCPStore(
                *spec.rank_info.master, world_size=None, is_master=True, wait_for_workers=False, master_listen_fd=store
            )
        separate_groups(spec.rank_info.master.port)
        # where torch is not loaded yet, it reads OMP_NUM_THREADS when it is
        torch, threads = sys.modules.get("torch"), spec.process_environment.threads
        if torch is not None and threads is not None and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if spec.kind == "xla":
            read_environment_again()
            wake(spec.rank_info.local_rank, spec.rank_info.local_size)

    def _fail(self, error: BaseException) -> None:
        background_tasks.salvage()
        self._note_interrupts()
        failure = failure_of(error, self._worker.rank, self._payload.sources)
        result = RankResult(failure.rank, failure=failure, error=error, modules=loaded_since(self._before))
        write_result(self._worker.descriptors.outcome, result)
        stdio.flush()
        self._sender.send(failure)
        self._send_state("stopped" if failure.ended_by_us else "failed")

    def _note_interrupts(self) -> None:
        """Report the end of the function whole: an interrupt that comes now, since another rank has failed, ends the wait after it."""

        def note(*_: object) -> None:
            self.is_interrupted = True

        signal.signal(signal.SIGINT, note)

    def _send_state(self, state: State) -> None:
        self._sender.send(StateChange(rank=self._sender.rank, state=state, time=time.time(), detail=str(os.getpid())))


def main() -> NoReturn:
    """Begin as a fresh Python: `python -m accelerate_nb.worker.main DESCRIPTOR`, where its worker can be read."""
    with open(int(sys.argv[1]), "rb") as file:
        message = message_of(file.read())
    assert isinstance(message, BeginWorker)
    work(message.worker, os.getppid())


if __name__ == "__main__":
    main()
