"""The side of the run host: it serves every process of its user that attaches to the run."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

from accelerate_nb.launching.detached.control_socket import ControlSocket, check_peer
from accelerate_nb.launching.detached.live_state import live_values
from accelerate_nb.launching.front_end import RunHandle
from accelerate_nb.transport.fd_messages import receive_message, send_message

# A client that takes nothing for so many seconds is given up.
_TIMEOUT = 30.0


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
        with client, suppress(OSError, ValueError):
            check_peer(client)
            while (received := receive_message(client)) is not None:
                client.settimeout(_TIMEOUT)
                send_message(client, self._reply(received[0]))
                client.settimeout(None)

    def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        match message.get("do"):
            case "stop":
                self._run.request_stop(message["how"])
                return {}
            case "stacks":
                return {"text": self._run.stacks()}
            case _:
                return {"state": self._run.view.state, "done": self._run.done, "live": live_values(self._run.view)}
