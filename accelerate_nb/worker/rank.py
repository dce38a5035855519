"""One rank from its first word to its last: what is done around the function, whether it has a process or a thread."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from accelerate_nb.events import pending
from accelerate_nb.events.channel import Sender
from accelerate_nb.events.emit import connect
from accelerate_nb.events.model import State, StateChange
from accelerate_nb.launching import answering, inbox, streams
from accelerate_nb.launching.installed import loaded_since
from accelerate_nb.launching.order import Order
from accelerate_nb.launching.outcome import Raised, failure_of, write_raised, write_returned
from accelerate_nb.launching.payload import Payload, arrived


class Rank:
    """
    A rank that its kernel hears of, and that hears its kernel, from when it is made; in the context of its own.

    >>> rank = Rank(order)
    >>> if rank.takes(rank.unpack, rank.run):
    ...     rank.finish()
    """

    def __init__(self, order: Order, payload: Payload | None = None) -> None:
        self.order = order
        self._payload = payload or arrived(order.descriptors.payload, order.descriptors.more)
        self._before = len(sys.modules)
        self._call: Callable[[], Any]
        sock = socket.socket(fileno=order.descriptors.events)
        self._sender = Sender(sock, order.seat.rank)
        connect(self._sender)
        self.told = inbox.Inbox(sock)
        inbox.connect(self.told)
        answering.answer(self.told)
        # from here on it answers the signal that asks where it is
        self._tell("starting")

    def takes(self, *steps: Callable[[], object]) -> bool:
        """Whether it comes through these steps; what one of them raises is this rank's failure, and told."""
        try:
            for step in steps:
                step()
        except BaseException as error:  # noqa: BLE001 - the border that promises to report everything
            self._fail(error)
            return False
        return True

    def unpack(self) -> None:
        """Have the function and its arguments, which are this rank's own."""
        self._call = self._payload.unpack()

    def run(self) -> None:
        """Call the function, and leave its value."""
        self._tell("running")
        value = self._call()
        pending.finish()
        write_returned(self.order.descriptors.outcome, value, loaded_since(self._before))

    def finish(self) -> None:
        """Say that the function has returned, after all that it wrote."""
        streams.flush()
        self._tell("finished")

    def wait_for_leave(self) -> None:
        """Stay until the kernel says so, or has gone: connections of other ranks end here."""
        try:
            self.told.wait_for_leave()
        except KeyboardInterrupt:
            return

    def _fail(self, error: BaseException) -> None:
        pending.salvage()
        failure = failure_of(error, self.order.seat.rank, self._payload.sources)
        write_raised(self.order.descriptors.outcome, Raised(failure, error, loaded_since(self._before)))
        streams.flush()
        self._sender.send(failure)
        self._tell("stopped" if failure.ended_by_us else "failed")

    def _tell(self, state: State) -> None:
        self._sender.send(StateChange(rank=self._sender.rank, state=state, time=time.time(), detail=str(os.getpid())))
