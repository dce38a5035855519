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

from accelerate_nb.failures.stack_dumps import SIGNAL, as_faulthandler
from accelerate_nb.rank import lockstep
from accelerate_nb.rank_local import alone
from accelerate_nb.transport.payload import Payload
from accelerate_nb.transport.rank_info import RANK_VARIABLES
from accelerate_nb.transport.worker_spec import LocalWorker
from accelerate_nb.worker import rank_environ, stdio, xla
from accelerate_nb.worker.rank import RankConnection


def work(workers: Sequence[LocalWorker], payload: Payload | None, prepare: Callable[[], object]) -> int:
    """
    Be the ranks of these workers until the kernel releases them; returns the exit code.

    `prepare` is called once for all, before the function is there. To be called in the main thread, which does nothing but
    take signals while the ranks' threads run. What torch, NumPy and Python draw random numbers from is the process's, and so
    are modules and their globals: ranks share them. They begin as they are in the notebook.
    """
    hand_contexts_on()
    rank_environ.separate(RANK_VARIABLES)
    out, err = stdio.separate()
    ranks: list[_RankThread] = []
    _take_signals(ranks)
    for worker in workers:
        leads = worker is workers[0]
        ranks.append(_RankThread(worker, payload, None if leads else (out, err)))
    _be_ready(ranks, prepare)
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.wait_for_leave()
    return 0 if all(rank.succeeds for rank in ranks) else 1


def _take_signals(ranks: Sequence[_RankThread]) -> None:
    """Hand the process's signals on to its ranks."""

    def interrupt(*_: Any) -> None:
        for rank in ranks:
            rank.interrupt()

    def dump_stack(_: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.dump_stack(frame)

    signal.signal(signal.SIGINT, interrupt)
    faulthandler.unregister(SIGNAL)
    signal.signal(SIGNAL, dump_stack)


def _be_ready(ranks: Sequence[_RankThread], prepare: Callable[[], object]) -> None:
    """Prepare the process, then have each rank unpack what it runs; an error is reported by the ranks that it concerns."""
    try:
        prepare()
        devices, steps = xla.devices_for(len(ranks)), xla.steps_together(len(ranks))
        xla.read_first_value(devices[0])
    except BaseException as error:  # noqa: BLE001 - reported by every rank
        for rank in ranks:
            rank.fail(error)
        return
    # in the order of ranks, and all before the first of them runs: unpacking sets the random states
    for rank, device in zip(ranks, devices, strict=True):
        rank.be_ready(device, steps)


class _RankThread:
    """One rank: its context, and its thread once it has begun."""

    def __init__(
        self, worker: LocalWorker, payload: Payload | None, streams: tuple[stdio.RankStream, stdio.RankStream] | None
    ) -> None:
        self._worker = worker
        self._context = alone()
        self._lockstep: lockstep.Lockstep | None = None
        self._device = ""
        self._is_interrupted = self._runs = False
        self._over = threading.Event()
        self.succeeds = True
        self._thread = threading.Thread(
            target=self._context.run, args=(self._run,), name=f"rank {worker.rank}", daemon=True
        )
        self._context.run(self._set_up, streams)
        self._rank: RankConnection = self._context.run(RankConnection, worker, payload)

    # -------------------------------------------------------------------------------------------- in the main thread

    def _set_up(self, streams: tuple[stdio.RankStream, stdio.RankStream] | None) -> None:
        variables = self._worker.spec.rank_info.environ()
        rank_environ.set_variables({name: variables.pop(name) for name in RANK_VARIABLES})
        os.environ.update(variables)
        for stream, name in zip(streams or (), ("stdout", "stderr"), strict=False):
            stream.lead(getattr(self._worker.descriptors, name))

    def be_ready(self, device: str, steps: lockstep.Lockstep | None) -> None:
        """Unpack what it runs."""
        self._device, self._lockstep = device, steps
        self._context.run(lockstep.keep, steps)
        if not self._context.run(self._rank.completes, self._rank.unpack):
            self._end(succeeds=False)

    def fail(self, error: BaseException) -> None:
        """It can't begin."""

        def fails() -> None:
            raise error

        self._context.run(self._rank.completes, fails)
        self._end(succeeds=False)

    def start(self) -> None:
        """Run the function, if it could be unpacked."""
        if self.succeeds:
            self._thread.start()

    def wait_for_leave(self) -> None:
        """Stay until its function has ended, and the kernel releases it."""
        # it releases also those whose processes it is about to kill
        self._over.wait()
        self._rank.wait_for_leave()

    def interrupt(self) -> None:
        """Raise `KeyboardInterrupt` in its thread, which sees it when it runs Python again; what waits for others is freed."""
        self._is_interrupted = True
        if self._runs:
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident or 0), interrupt)
        if self._lockstep is not None:
            self._lockstep.leave()

    def dump_stack(self, frame: FrameType | None) -> None:
        """Write where it is, as faulthandler would; `frame` is what the main thread does, which is what it does before it begins."""
        frame_now = sys._current_frames().get(self._thread.ident or 0, frame)
        os.write(self._worker.descriptors.stacks, as_faulthandler(frame_now).encode(errors="replace"))

    # --------------------------------------------------------------------------------------------- in the rank's thread

    def _run(self) -> None:
        is_reported = False
        try:
            if self._rank.completes(self._work):
                self._rank.finish()
                self._end(succeeds=True)
            else:
                self._end(succeeds=False)
            is_reported = True
        finally:
            if not is_reported:
                # a second interrupt while it reported the first: the kernel has to learn that nothing more comes
                os._exit(70)

    def _work(self) -> None:
        self._runs = True
        try:
            if self._is_interrupted:
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
    Give each new thread of this process the context of the one that starts it, so that what it prints is its rank's.

    Python 3.14 does so with an option (`-X thread_inherit_context`).
    """
    start, bootstrap = threading.Thread.start, threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def start_with_context(thread: Any) -> None:
        thread._accelerate_nb_context = copy_context()
        start(thread)

    # not only its `run`: what that raises is printed by the code around it
    def bootstrap_in_context(thread: Any) -> None:
        thread._accelerate_nb_context.run(bootstrap, thread)

    threading.Thread.start = start_with_context  # type: ignore[assignment,method-assign]
    threading.Thread._bootstrap_inner = bootstrap_in_context  # type: ignore[attr-defined]
