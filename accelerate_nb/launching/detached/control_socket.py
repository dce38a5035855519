"""The socket of a run host: where it is, who may use it, and what is sent over it."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate_nb.errors import LaunchError

_NAME = "control.sock"
# The size of `sockaddr_un.sun_path` is 108 bytes on Linux and 104 on macOS.
_LONGEST_PATH = 100
_CREDENTIALS = struct.Struct("3i")


class ControlSocket:
    """
    A listening Unix socket that only its user can open, in the run's folder or, where that can hold none, in one of its own.

    `path` is its address, for `connect`; closing it removes it.
    """

    def __init__(self, folder: Path) -> None:
        self._own_folder: Path | None = None
        try:
            self.path = folder / _NAME
            self.sock = _bound(self.path)
        except OSError:
            # shared and synchronised folders may hold no sockets
            self._own_folder = Path(tempfile.mkdtemp(prefix="accelerate_nb_"))
            self.path = self._own_folder / _NAME
            self.sock = _bound(self.path)
        self.sock.listen(64)

    def close(self) -> None:
        """Close it, and remove its file."""
        self.sock.close()
        with suppress(OSError):
            self.path.unlink()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)


def _bound(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # the file has its mode from the first moment
    before = os.umask(0o177)
    try:
        with _short(path) as address:
            sock.bind(address)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(before)
    return sock


def connect(path: Path, timeout: float) -> socket.socket:
    """A connection to the run host that listens there; raises `OSError` where none does, or it is another user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        with _short(path) as address:
            sock.connect(address)
        check_peer(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def check_peer(sock: socket.socket) -> None:
    """Raise `PermissionError` where the process at the other end of a connection is another user's."""
    user = _peer_user(sock)
    if user != os.getuid():
        raise PermissionError(f"The process at the other end is of user {user}, and this one is of user {os.getuid()}.")


def _peer_user(sock: socket.socket) -> int:
    if sys.platform == "linux":
        return int(_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1])
    # `getpeereid` of macOS and the BSDs, which Python does not offer; a `struct xucred` holds it as well: version, user, ...
    local_peercred, size = 0x001, 76
    return int(struct.unpack_from("2I", sock.getsockopt(0, local_peercred, size))[1])


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """An address of a socket's file that is short enough, while the block runs."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    if sys.platform != "linux":
        raise OSError(f"{path} is too long for the address of a socket")
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def check_owner(folder: Path) -> None:
    """Raise `LaunchError` where a run's folder is another user's: what it holds is unpickled."""
    owner = folder.stat().st_uid
    if owner != os.getuid():
        raise LaunchError(
            f"{folder} was named, which is a folder of user {owner}, and this process is of user {os.getuid()}. Results are "
            "unpickled, which may run any code: attach as the user who launched the run."
        )
