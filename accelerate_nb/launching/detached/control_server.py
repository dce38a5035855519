"""The side of the run host: it serves every process of its user that attaches to the run."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.launching.detached.control_socket import ControlSocket, check_peer
from accelerate_nb.launching.detached.live_state import live_events
from accelerate_nb.launching.front_end import RunHandle
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import (
    ChangeKnob,
    LiveState,
    Message,
    QueryLiveState,
    QueryStacks,
    RequestProfile,
    StacksReply,
    StopRun,
)

# A client that takes nothing for so many seconds is given up.
_TIMEOUT = 30.0
# Requests are short; a reply may hold the stacks of many ranks.
_SIZE_LIMIT = 16 << 20


class ControlServer:
    """
    Answers clients until it is closed: each has a thread of its own, so that none keeps another or the run waiting.

    >>> with ControlServer(ControlSocket(folder), run):
    ...     run.wait()
    """

    def __init__(self, control: ControlSocket, run: RunHandle) -> None:
        self._control, self._run = control, run
        self._thread = threading.Thread(target=self._accept, name="accelerate_nb control", daemon=True)

    def __enter__(self) -> ControlServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # wakes the thread that accepts, which a close alone does not
        with suppress(OSError):
            self._control.sock.shutdown(socket.SHUT_RDWR)
        self._control.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._control.sock.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="accelerate_nb client", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with Channel(client, _SIZE_LIMIT) as channel, suppress(OSError):
            check_peer(client)
            while (received := channel.receive()) is not None:
                reply = self._reply(received.message)
                if reply is None:
                    channel.refuse(received)
                    continue
                client.settimeout(_TIMEOUT)
                channel.send(reply)
                client.settimeout(None)

    def _reply(self, message: Message) -> Message | None:
        match message:
            case StopRun(how):
                self._run.request_stop(how)
            case ChangeKnob(name, value):
                # the attached process has checked it; a run that has ended meanwhile changes nothing
                with suppress(AccelerateNbError):
                    self._run.set_knob(name, value)
            case RequestProfile(steps, ranks):
                with suppress(AccelerateNbError):
                    self._run.profile(steps, ranks)
            case QueryStacks():
                return StacksReply(self._run.stacks())
            case QueryLiveState():
                pass
            case _:
                return None
        return LiveState(self._run.done, tuple(live_events(self._run.view)))
