"""A process from its first line to its last: what a worker does around its ranks."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing import process, util
from typing import Any, NoReturn

from accelerate_nb.launching import bars, showing, streams, threads, xla
from accelerate_nb.launching.order import Order, of_text
from accelerate_nb.launching.payload import Payload
from accelerate_nb.launching.rank import Rank
from accelerate_nb.launching.seat import LOOPBACK
from accelerate_nb.launching.sessions import die_with_parent, tie_children
from accelerate_nb.launching.stacks import SIGNAL

# How long what was registered with atexit may take.
_PARTING = 2.0


def work(orders: Sequence[Order], parent: int, payload: Payload | None = None) -> NoReturn:
    """Be a worker: run the payload for each rank, leave their outcomes, wait until all have, and end the process."""
    try:
        _settle(orders[0], parent)
        # other ranks need the store also after this one's function has returned: it lasts until all have
        store: list[Any] = []
        code = _alone(orders[0], payload, store) if len(orders) == 1 else _together(orders, payload, store)
        _part()
        os._exit(code)
    finally:
        # nothing of the process that this one was forked from may run on in here
        os._exit(70)


def _alone(order: Order, payload: Payload | None, store: list[Any]) -> int:
    """Be one rank, in this thread; gives the exit code."""
    os.environ.update(order.seat.environ())
    rank = Rank(order, payload)
    succeeds = rank.takes(lambda: _prepare(order, store), rank.unpack, rank.run)
    if succeeds:
        rank.finish()
    rank.wait_for_leave()
    return 0 if succeeds else 1


def _together(orders: Sequence[Order], payload: Payload | None, store: list[Any]) -> int:
    """Be several ranks, each in a thread; gives the exit code."""
    return threads.work(orders, payload, lambda: _prepare(orders[0], store))


def _prepare(order: Order, store: list[Any]) -> None:
    """What a process does before its ranks begin; what hosts the ranks' meeting is put into `store`."""
    store.append(_host_store(order))
    _set_threads(order.surroundings.threads)
    if order.through_xla:
        xla.wake(order.seat)


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
    faulthandler.register(SIGNAL, file=order.descriptors.stacks, all_threads=False, chain=False)
    order.surroundings.take_over()
    showing.install()
    bars.install()


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
    """Begin as a fresh Python: `python -m accelerate_nb.launching.worker DESCRIPTOR`, where the orders can be read."""
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        orders = of_text(file.read())
    work(orders, os.getppid())


if __name__ == "__main__":
    main()
