"""Processes that are forked before they are needed: a launch only has to send them what they are."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import NoReturn

from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import BeginWorker
from accelerate_nb.transport.worker_spec import LocalWorker, arrived_workers
from accelerate_nb.worker.main import work
from accelerate_nb.worker.process_session import die_with_parent

# How many are kept where nothing is known, and how many at most.
_FEWEST = 2
_MOST = 8


class PreforkPool:
    """The processes that wait; each is a copy of the supervisor as it was, so they are given up when that changes."""

    def __init__(self) -> None:
        self._waiting: dict[int, Channel] = {}
        self._target = _FEWEST

    def expect(self, size: int) -> None:
        """Keep enough for launches of this size."""
        self._target = min(_MOST, max(self._target, size))

    def are_missing(self) -> bool:
        """Whether there should be more."""
        return len(self._waiting) < self._target

    def add(self, forget: Callable[[], None]) -> None:
        """Fork one more; `forget` closes, in the new process, what belongs to this one."""
        parent = os.getpid()
        try:
            near, far = socket.socketpair()
            pid = os.fork()
        except OSError:
            # a limit of the system's is reached, which a launch reports
            self._target = len(self._waiting)
            return
        if pid == 0:
            forget()
            near.close()
            _wait(Channel(far), parent)
        far.close()
        self._waiting[pid] = Channel(near)

    def use(self, workers: Sequence[LocalWorker], descriptors: Sequence[int]) -> int | None:
        """Make one of them the process of workers; returns its process number, or `None` where there is none."""
        while self._waiting:
            pid, channel = self._waiting.popitem()
            with channel:
                # one that was killed takes none
                if channel.try_send(BeginWorker(tuple(workers)), descriptors):
                    return pid
        return None

    def gone(self, pid: int) -> None:
        """Forget a process that has ended, where it was in the pool."""
        if (channel := self._waiting.pop(pid, None)) is not None:
            channel.close()

    def forget(self) -> None:
        """Close what this process holds of them; where no other does, they end."""
        for channel in self._waiting.values():
            channel.close()
        self._waiting.clear()


def begin(workers: Sequence[LocalWorker], arrived: Sequence[int], parent: int) -> NoReturn:
    """Be the process of workers whose descriptors have arrived."""
    work(arrived_workers(workers, arrived), parent)


def _wait(channel: Channel, parent: int) -> NoReturn:
    try:
        die_with_parent(parent)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        received = channel.receive()
        if received is not None and isinstance(received.message, BeginWorker):
            channel.close()
            begin(received.message.workers, received.descriptors, parent)
    finally:
        # nobody needs it, or nobody is there any more
        os._exit(0)
