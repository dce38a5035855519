"""A worker from its first line to its last: what it does around its function."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
from multiprocessing import process, util
from typing import Any, NoReturn

from accelerate_nb.devices.xla import read_environment_again, wake
from accelerate_nb.failures.stack_dumps import SIGNAL
from accelerate_nb.rank import step_profiler
from accelerate_nb.transport.channel import message_of
from accelerate_nb.transport.messages import BeginWorker
from accelerate_nb.transport.payload import Payload
from accelerate_nb.transport.spawned_processes import send_main_by_value
from accelerate_nb.transport.worker_spec import LocalWorker
from accelerate_nb.worker import logging_hooks, stdio, tqdm_hook
from accelerate_nb.worker.process_group_keys import separate_groups
from accelerate_nb.worker.process_session import die_with_parent, tie_children
from accelerate_nb.worker.rank import RankConnection

# How long what was registered with atexit may take.
_PARTING = 2.0


def work(worker: LocalWorker, parent: int, payload: Payload | None = None) -> NoReturn:
    """Be a worker: run the payload, leave its outcome, wait until all ranks have, and end the process."""
    try:
        _settle(worker, parent)
        # other ranks need the store also after this one's function has returned: it lasts until all have
        store: list[Any] = []
        os.environ.update(worker.spec.rank_info.environ())
        rank = RankConnection(worker, payload)
        succeeds = rank.completes(lambda: _prepare(worker, store), rank.unpack, rank.run)
        if succeeds:
            rank.finish()
        rank.wait_for_leave()
        _part()
        os._exit(0 if succeeds else 1)
    finally:
        # nothing of the process that this one was forked from may run on in here
        os._exit(70)


def _prepare(worker: LocalWorker, store: list[Any]) -> None:
    """Prepare the process before its function is there; the store that it hosts, if any, is put into `store`."""
    spec = worker.spec
    store.append(_host_store(worker))
    separate_groups(*spec.rank_info.master)
    _set_threads(spec.process_environment.threads)
    if spec.kind == "xla":
        read_environment_again()
        wake(spec.rank_info.local_rank, spec.rank_info.local_size)


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
    signal.signal(signal.SIGINT, signal.default_int_handler)
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


def _host_store(worker: LocalWorker) -> Any:
    """On rank 0: the store of the ranks' rendezvous, on the listening socket that was bound before any of them started."""
    if worker.descriptors.store < 0:
        return None
    from torch.distributed import TCPStore

    return TCPStore(
        *worker.spec.rank_info.master,
        world_size=None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=worker.descriptors.store,
    )


def _set_threads(threads: int | None) -> None:
    # where torch is not loaded yet, it reads OMP_NUM_THREADS when it is
    torch = sys.modules.get("torch")
    if torch is not None and threads is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


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


def main() -> NoReturn:
    """Begin as a fresh Python: `python -m accelerate_nb.worker.main DESCRIPTOR`, where its worker can be read."""
    with open(int(sys.argv[1]), "rb") as file:
        message = message_of(file.read())
    assert isinstance(message, BeginWorker)
    work(message.worker, os.getppid())


if __name__ == "__main__":
    main()
