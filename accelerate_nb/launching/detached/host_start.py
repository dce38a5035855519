"""The start of a run host as both processes see it: what the host prints and raises until it is ready comes to the one that started it."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TextIO

from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.launching.detached.saved_outcome import error_class, error_kind
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import (
    HostFailed,
    HostNotice,
    HostReady,
)


class _NoticeStream(io.TextIOBase):
    """Sends what is written to the process that waits, and writes it into the log where none does."""

    def __init__(self, launcher: Channel, log: TextIO) -> None:
        self._launcher, self._log = launcher, log

    def write(self, text: str) -> int:
        """Send a text, or write it."""
        return len(text) if self._launcher.try_send(HostNotice(text)) else self._log.write(text)


@contextmanager
def reported_start(sock: socket.socket) -> Iterator[Channel]:
    """
    In the run host: inside the block, notices and errors of this package go to the process at the other end of `sock`.

    Where that process waits no more, since it was interrupted or has ended, this one ends, too. Gives the channel to it.
    """
    launcher = Channel(sock)
    over = threading.Event()

    def end_with_launcher() -> None:
        if launcher.receive() is None and not over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    # an exit by the way of Python: what was started in the block is ended first
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    watch = threading.Thread(target=end_with_launcher, name="accelerate_nb launcher", daemon=True)
    watch.start()
    try:
        with redirect_stderr(_NoticeStream(launcher, sys.stderr)):
            yield launcher
    except AccelerateNbError as error:
        launcher.try_send(HostFailed(error_kind(error), str(error)))
        raise
    finally:
        over.set()
        # ends the thread that reads; this end can still send
        sock.shutdown(socket.SHUT_RD)
        watch.join()


def wait_until_ready(host: Channel, timeout: float) -> bool:
    """
    Show a run host's notices until it is ready; whether it is, rather than having ended without a word.

    Raises what it raised, and `TimeoutError` where nothing comes from it for `timeout` seconds.
    """
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    while (received := host.receive(timeout)) is not None:
        match received.message:
            case HostReady():
                return True
            case HostNotice(text):
                sys.stderr.write(text)
                sys.stderr.flush()
            case HostFailed(kind, text):
                raise error_class(kind)(text)
            case _:
                host.refuse(received)
    return False
