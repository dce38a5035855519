"""Which TCP ports of this machine are taken."""

from __future__ import annotations

import socket


def is_port_in_use(port: int | None = None) -> bool:
    """Whether someone listens at a port of this machine; 29500, at which torch's processes meet, where none is named."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as caller:
        return caller.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_free_port() -> int:
    """A port that was free a moment ago; who can bind port 0 directly is safer."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
