"""A process from its first line to its last: what a worker does around the function."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing import process, util
from typing import Any, NoReturn

from accelerate_nb.events import pending
from accelerate_nb.events.channel import Sender
from accelerate_nb.events.emit import connect
from accelerate_nb.events.model import State, StateChange
from accelerate_nb.launching import answering, bars, inbox, showing, streams
from accelerate_nb.launching.installed import loaded_since
from accelerate_nb.launching.order import Order
from accelerate_nb.launching.outcome import Raised, failure_of, write_raised, write_returned
from accelerate_nb.launching.payload import Payload, arrived
from accelerate_nb.launching.seat import LOOPBACK
from accelerate_nb.launching.sessions import die_with_parent, tie_children

# The signal at which a worker writes every thread's stack, also while it waits in C++.
STACKS_SIGNAL = signal.SIGUSR1
# How long what was registered with atexit may take.
_PARTING = 2.0


def work(order: Order, parent: int, payload: Payload | None = None) -> NoReturn:
    """Be a worker: run the payload, leave its outcome, wait until all have, and end the process."""
    try:
        _settle(order, parent)
        sock = socket.socket(fileno=order.descriptors.events)
        sender = Sender(sock, order.seat.rank)
        connect(sender)
        told = inbox.Inbox(sock)
        inbox.connect(told)
        answering.answer(told)
        # from here on it answers the signal that asks where it is
        _tell(sender, "starting")
        # other ranks need the store also after this one's function has returned: it lasts until all have
        store: list[Any] = []
        code = _run(order, sender, payload or arrived(order.descriptors.payload, order.descriptors.more), store)
        _wait_for_leave(told)
        _part()
        os._exit(code)
    finally:
        # nothing of the process that this one was forked from may run on in here
        os._exit(70)


def _settle(order: Order, parent: int) -> None:
    """Become a process of one's own: session, streams, signals, surroundings."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    die_with_parent(parent)
    tie_children()
    atexit._clear()
    process._children = set()  # type: ignore[attr-defined]  # as multiprocessing's own children do
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    util._run_after_forkers()  # type: ignore[attr-defined]
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    streams.take_over(order.descriptors.stdout, order.descriptors.stderr)
    for own in (order.descriptors.stdout, order.descriptors.stderr):
        os.close(own)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # a notebook's kernel has switched it on already, and a forked worker's last words would go to the kernel's streams
    faulthandler.enable(file=order.descriptors.stacks)
    # the main thread alone, which the signal goes to: other threads run on while their stacks are read, and that ends in a
    # fault of memory before long
    faulthandler.register(STACKS_SIGNAL, file=order.descriptors.stacks, all_threads=False, chain=False)
    order.surroundings.take_over()
    os.environ.update(order.seat.environ())
    showing.install()
    bars.install()


def _run(order: Order, sender: Sender, payload: Payload, store: list[Any]) -> int:
    """Run the call, leave what came of it, say so; gives the exit code. What hosts the ranks' meeting is put into `store`."""
    rank, outcome, before = order.seat.rank, order.descriptors.outcome, len(sys.modules)
    try:
        store.append(_host_store(order))
        _set_threads(order.surroundings.threads)
        call = payload.unpack()
        _tell(sender, "running")
        value = call()
        pending.finish()
        write_returned(outcome, value, loaded_since(before))
    except BaseException as error:
        failure = failure_of(error, rank, payload.sources)
        write_raised(outcome, Raised(failure, error, loaded_since(before)))
        streams.flush()
        sender.send(failure)
        _tell(sender, "stopped" if failure.ended_by_us else "failed")
        return 1
    streams.flush()
    _tell(sender, "finished")
    return 0


def _host_store(order: Order) -> Any:
    """On rank 0: the store at which all ranks meet, on the listening socket that was bound before any of them started."""
    if order.descriptors.store < 0:
        return None
    from torch.distributed import TCPStore

    return TCPStore(
        LOOPBACK,
        order.seat.port,
        world_size=None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=order.descriptors.store,
    )


def _set_threads(threads: int | None) -> None:
    # where torch is not loaded yet, it reads OMP_NUM_THREADS when it is
    torch = sys.modules.get("torch")
    if torch is not None and threads is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _tell(sender: Sender, state: State) -> None:
    sender.send(StateChange(rank=sender.rank, state=state, time=time.time(), detail=str(os.getpid())))


def _wait_for_leave(told: inbox.Inbox) -> None:
    """Stay until the kernel says so, or has gone: connections of other ranks end here."""
    try:
        told.wait_for_leave()
    except KeyboardInterrupt:
        return


def _part() -> None:
    """Run what was registered for the end, but not for ever."""
    watch = threading.Timer(_PARTING, os._exit, (0,))
    watch.daemon = True
    watch.start()
    try:
        atexit._run_exitfuncs()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    streams.flush()


def main() -> NoReturn:
    """Begin as a fresh Python: `python -m accelerate_nb.launching.worker DESCRIPTOR`, where the order can be read."""
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        order = Order.from_json(file.read())
    work(order, os.getppid())


if __name__ == "__main__":
    main()
