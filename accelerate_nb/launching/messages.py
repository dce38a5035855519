"""How the kernel speaks with its supervisor: one JSON object a message, descriptors beside it."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

# The length of what follows, and how many descriptors come with it.
_HEAD = struct.Struct("<II")
# Linux passes at most this many in one message (SCM_MAX_FD).
_MOST_DESCRIPTORS = 253


def send_message(sock: socket.socket, said: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message; the descriptors stay open here."""
    body = json.dumps(said).encode()
    ancillary = []
    if descriptors:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    sock.sendmsg([_HEAD.pack(len(body), len(descriptors))], ancillary)
    sock.sendall(body)


def receive_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors, which are the caller's to close; `None` where the other side has gone."""
    space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
    head, ancillary, _, _ = sock.recvmsg(_HEAD.size, space)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    rest = _exactly(sock, _HEAD.size - len(head)) if head else None
    if rest is None:
        return None
    length, _ = _HEAD.unpack(head + rest)
    body = _exactly(sock, length)
    if body is None:
        return None
    said: dict[str, Any] = json.loads(body)
    return said, list(descriptors)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
