"""Workers forked from this very process."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

from accelerate_nb.launching.engines.children import Children
from accelerate_nb.launching.order import Order
from accelerate_nb.launching.payload import Payload
from accelerate_nb.launching.worker import work


class FromThisProcess:
    """Places workers by forking: they inherit everything, so nothing has to travel."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload

    def start(self, orders: Sequence[Sequence[Order]]) -> Children:
        """Fork one process for each sequence of orders."""
        # what is buffered here would be written by every child as well
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return Children({self._fork(own): [order.seat.rank for order in own] for own in orders})

    def _fork(self, orders: Sequence[Order]) -> int:
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns of forking a process with threads; it was asked for, and the child takes none of their locks
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            work(orders, parent, self._payload)
        return pid
