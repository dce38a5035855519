"""Several ranks in one process, each in a thread: what each of them has for itself, and what they share."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from types import FrameType
from typing import Any

from accelerate_nb.devices import lockstep
from accelerate_nb.launching import streams, variables, xla
from accelerate_nb.launching.order import Order
from accelerate_nb.launching.payload import Payload
from accelerate_nb.launching.rank import Rank
from accelerate_nb.launching.seat import OWN_VARIABLES
from accelerate_nb.launching.stacks import SIGNAL, as_faulthandler
from accelerate_nb.own import alone


def work(orders: Sequence[Order], payload: Payload | None, prepare: Callable[[], object]) -> int:
    """
    Be the ranks of these orders until the kernel lets them go; gives the exit code.

    `prepare` is called once for all, before the function is there. To be called in the main thread, which does nothing but
    take signals while the ranks' threads run. What torch, NumPy and Python draw random numbers from is the process's, and so
    are modules and their globals: ranks share them. They begin as they are in the notebook.
    """
    hand_contexts_on()
    variables.separate(OWN_VARIABLES)
    out, err = streams.separate()
    ranks: list[_Thread] = []
    _take_signals(ranks)
    for order in orders:
        leads = order is orders[0]
        ranks.append(_Thread(order, payload, None if leads else (out, err)))
    _be_ready(ranks, prepare)
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.wait_for_leave()
    return 0 if all(rank.succeeds for rank in ranks) else 1


def _take_signals(ranks: Sequence[_Thread]) -> None:
    """Hand what the process is told by signals on to its ranks."""

    def interrupt(*_: Any) -> None:
        for rank in ranks:
            rank.interrupt()

    def tell_where(_: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.tell_where(frame)

    signal.signal(signal.SIGINT, interrupt)
    faulthandler.unregister(SIGNAL)
    signal.signal(SIGNAL, tell_where)


def _be_ready(ranks: Sequence[_Thread], prepare: Callable[[], object]) -> None:
    """Prepare the process, then have each rank unpack what it runs; what goes wrong is said by those whom it concerns."""
    try:
        prepare()
        devices, steps = xla.devices_for(len(ranks)), xla.steps_together(len(ranks))
    except BaseException as error:  # noqa: BLE001 - reported by every rank
        for rank in ranks:
            rank.fail(error)
        return
    # in the order of ranks, and all before the first of them runs: unpacking sets the random states
    for rank, device in zip(ranks, devices, strict=True):
        rank.be_ready(device, steps)


class _Thread:
    """One rank: its context, and its thread once it has begun."""

    def __init__(
        self, order: Order, payload: Payload | None, own_streams: tuple[streams.OfRank, streams.OfRank] | None
    ) -> None:
        self._order = order
        self._context = alone()
        self._lockstep: lockstep.Lockstep | None = None
        self._device = ""
        self._is_asked = self._runs = False
        self._over = threading.Event()
        self.succeeds = True
        self._thread = threading.Thread(
            target=self._context.run, args=(self._run,), name=f"rank {order.seat.rank}", daemon=True
        )
        self._context.run(self._sit_down, own_streams)
        self._rank: Rank = self._context.run(Rank, order, payload)

    # -------------------------------------------------------------------------------------------- in the main thread

    def _sit_down(self, own_streams: tuple[streams.OfRank, streams.OfRank] | None) -> None:
        said = self._order.seat.environ()
        variables.say({name: said.pop(name) for name in OWN_VARIABLES})
        os.environ.update(said)
        for stream, name in zip(own_streams or (), ("stdout", "stderr"), strict=False):
            stream.lead(getattr(self._order.descriptors, name))

    def be_ready(self, device: str, steps: lockstep.Lockstep | None) -> None:
        """Unpack what it runs."""
        self._device, self._lockstep = device, steps
        self._context.run(lockstep.keep, steps)
        if not self._context.run(self._rank.takes, self._rank.unpack):
            self._end(succeeds=False)

    def fail(self, error: BaseException) -> None:
        """It can't begin."""

        def fails() -> None:
            raise error

        self._context.run(self._rank.takes, fails)
        self._end(succeeds=False)

    def start(self) -> None:
        """Run the function, if it could be unpacked."""
        if self.succeeds:
            self._thread.start()

    def wait_for_leave(self) -> None:
        """Stay until its function has ended, and the kernel has heard of all ranks and says so."""
        # it says so also to those whose processes it is about to kill
        self._over.wait()
        self._rank.wait_for_leave()

    def interrupt(self) -> None:
        """Raise `KeyboardInterrupt` in its thread, which sees it when it runs Python again; what waits for others is freed."""
        self._is_asked = True
        if self._runs:
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident or 0), interrupt)
        if self._lockstep is not None:
            self._lockstep.leave()

    def tell_where(self, frame: FrameType | None) -> None:
        """Write where it is, as faulthandler would; `frame` is what the main thread does, which is what it does before it begins."""
        here = sys._current_frames().get(self._thread.ident or 0, frame)
        os.write(self._order.descriptors.stacks, as_faulthandler(here).encode(errors="replace"))

    # --------------------------------------------------------------------------------------------- in the rank's thread

    def _run(self) -> None:
        told = False
        try:
            if self._rank.takes(self._work):
                self._rank.finish()
                self._end(succeeds=True)
            else:
                self._end(succeeds=False)
            told = True
        finally:
            if not told:
                # a second interrupt while it told of the first: the kernel has to learn that nothing more comes
                os._exit(70)

    def _work(self) -> None:
        self._runs = True
        try:
            if self._is_asked:
                raise KeyboardInterrupt
            xla.compute_on(self._device)
            self._rank.run()
        finally:
            self._runs = False

    def _end(self, *, succeeds: bool) -> None:
        self.succeeds = succeeds
        self._over.set()
        if self._lockstep is not None:
            self._lockstep.leave()


def hand_contexts_on() -> None:
    """
    From now on a thread of this process has the context of the one that starts it, so that what it prints is its rank's.

    Python 3.14 does so where it is told to (`-X thread_inherit_context`).
    """
    start, bootstrap = threading.Thread.start, threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def start_with_context(thread: Any) -> None:
        thread._accelerate_nb_context = copy_context()
        start(thread)

    # not only its `run`: what that raises is printed by its surroundings
    def bootstrap_in_context(thread: Any) -> None:
        thread._accelerate_nb_context.run(bootstrap, thread)

    threading.Thread.start = start_with_context  # type: ignore[assignment,method-assign]
    threading.Thread._bootstrap_inner = bootstrap_in_context  # type: ignore[attr-defined]
