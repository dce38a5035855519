"""Messages between the kernel and its supervisor: one JSON object each, descriptors beside it."""

from __future__ import annotations

import array
import errno
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


def send_message(sock: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message; the descriptors stay open here."""
    body = json.dumps(message).encode()
    head = _HEAD.pack(len(body), len(descriptors))
    for start in range(0, max(len(descriptors), 1), _MOST_DESCRIPTORS):
        batch = array.array("i", descriptors[start : start + _MOST_DESCRIPTORS])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, batch)] if batch else []
        # descriptors can only go with a byte at least
        sock.sendmsg([head if start == 0 else b"+"], ancillary)
    sock.sendall(body)


def receive_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors, which are the caller's to close; `None` where the other side has gone."""
    head, descriptors = _with_descriptors(sock, _HEAD.size)
    rest = _exactly(sock, _HEAD.size - len(head)) if head else None
    if rest is None:
        return None
    length, count = _HEAD.unpack(head + rest)
    for _ in range(_MOST_DESCRIPTORS, count, _MOST_DESCRIPTORS):
        descriptors += _with_descriptors(sock, 1)[1]
    if len(descriptors) < count:
        raise OSError(errno.EMFILE, f"of {count} descriptors {len(descriptors)} arrived: too many are open here")
    body = _exactly(sock, length)
    if body is None:
        return None
    message: dict[str, Any] = json.loads(body)
    return message, descriptors


def _with_descriptors(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """At most so many bytes, and the descriptors that came with them."""
    data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize))
    descriptors = array.array("i")
    for level, kind, held in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(held[: len(held) - len(held) % descriptors.itemsize])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return data, list(descriptors)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
