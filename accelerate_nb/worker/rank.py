"""One rank from its start to its end: what is done around the function."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from accelerate_nb.events.event_codec import EventSender
from accelerate_nb.events.model import State, StateChange
from accelerate_nb.failures.rank_result import RankResult
from accelerate_nb.rank import background_tasks
from accelerate_nb.rank.event_sink import connect
from accelerate_nb.rank.step_profiler import current_step_profiler
from accelerate_nb.sources.installed_packages import loaded_since
from accelerate_nb.transport.outcome import failure_of, write_result
from accelerate_nb.transport.payload import Payload, received_payload
from accelerate_nb.transport.worker_spec import LocalWorker
from accelerate_nb.worker import control_channel, stdio


class RankConnection:
    """
    A rank's connection to its kernel, in both directions, from when it is made.

    >>> rank = RankConnection(worker)
    >>> if rank.completes(rank.unpack, rank.run):
    ...     rank.finish()
    """

    def __init__(self, worker: LocalWorker, payload: Payload | None = None) -> None:
        self._worker = worker
        self._payload = payload or received_payload(worker.descriptors.payload, worker.descriptors.more)
        self._before = len(sys.modules)
        self._call: Callable[[], Any]
        self._is_interrupted = False
        sock = socket.socket(fileno=worker.descriptors.events)
        self._sender = EventSender(sock, worker.rank)
        connect(self._sender)
        self.channel = control_channel.ControlChannel(sock)
        control_channel.connect(self.channel)
        control_channel.install(self.channel)
        # from here on it dumps its stack at the signal
        self._send_state("starting")

    def completes(self, *steps: Callable[[], object]) -> bool:
        """Whether these steps succeed; an exception of one is reported as this rank's failure."""
        try:
            for step in steps:
                step()
        except BaseException as error:  # noqa: BLE001 - the border that promises to report everything
            self._fail(error)
            return False
        return True

    def unpack(self) -> None:
        """Unpack the function and its arguments, this rank's own copies."""
        self._call = self._payload.unpack()

    def run(self) -> None:
        """Call the function, and leave its value."""
        self._send_state("running")
        try:
            value = self._call()
        finally:
            current_step_profiler().end_function()
        background_tasks.finish()
        is_wanted = self._worker.spec.is_result_wanted
        result = RankResult(self._worker.rank, value, modules=loaded_since(self._before))
        write_result(self._worker.descriptors.outcome, result, is_wanted=is_wanted)

    def finish(self) -> None:
        """Report that the function has returned, after all that it wrote."""
        self._note_interrupts()
        stdio.flush()
        self._send_state("finished")

    def wait_for_leave(self) -> None:
        """Stay until the kernel releases it, or has gone: connections of other ranks end here."""
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if not self._is_interrupted:
                self.channel.wait_for_leave()
        except KeyboardInterrupt:
            return

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
            self._is_interrupted = True

        signal.signal(signal.SIGINT, note)

    def _send_state(self, state: State) -> None:
        self._sender.send(StateChange(rank=self._sender.rank, state=state, time=time.time(), detail=str(os.getpid())))
