"""The control socket of a run host: where it is, who may use it, what is served over it, and the way to it from elsewhere."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate_nb.errors import AccelerateNbError, LaunchError
from accelerate_nb.events.model import Event, LogLine
from accelerate_nb.events.run_state import RunState
from accelerate_nb.launching.nodes.node_engine import step_command
from accelerate_nb.launching.run import RunControl
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import (
    ChangeKnob,
    LiveState,
    Message,
    QueryLiveState,
    QueryStacks,
    RequestProfile,
    RequestStop,
    StacksReply,
)

_NAME = "control.sock"
# The size of `sockaddr_un.sun_path` is 108 bytes on Linux and 104 on macOS.
_LONGEST_PATH = 100
_CREDENTIALS = struct.Struct("3i")
# A client that takes nothing for so many seconds is given up.
_CLIENT_TIMEOUT = 30.0
# Requests are short; a reply may hold the stacks of many ranks.
_SIZE_LIMIT = 16 << 20
_REPLY_TIMEOUT = 5.0
# How long a command may take until what it passes on arrives, in seconds.
_TUNNEL_TIMEOUT = 30.0
_CONNECT_TIMEOUT = 10.0
_AT_ONCE = 1 << 16


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


def live_events(view: RunState) -> Iterator[Event]:
    """The events that make up this part of a state."""
    if view.host is not None:
        yield view.host
    yield from view.node_loads.values()
    for glance in view.glances():
        yield from glance.devices.values()
        yield from (bar for bar in glance.progress.values() if not bar.closed)
        yield from glance.open_lines


def apply_live(view: RunState, events: Sequence[Event]) -> None:
    """Bring another view of the same run to this state."""
    for event in events:
        if not isinstance(event, LogLine):
            view.apply(event)
    view.replace_open_lines([event for event in events if isinstance(event, LogLine)])


class ControlServer:
    """
    Answers clients until it is closed: each has a thread of its own, so that none keeps another or the run waiting.

    >>> with ControlServer(ControlSocket(folder), conductor):
    ...     conductor.over.wait()
    """

    def __init__(self, control: ControlSocket, run: RunControl) -> None:
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
                client.settimeout(_CLIENT_TIMEOUT)
                channel.send(reply)
                client.settimeout(None)

    def _reply(self, message: Message) -> Message | None:
        match message:
            case RequestStop(how):
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
        return LiveState(self._run.over.is_set(), tuple(live_events(self._run.view)))


class ControlClient:
    """
    Sends requests to a run host over one connection, which is made again where it broke; from any thread.

    `tunnel` is the command that passes on its standard input to the socket where that is on another machine.
    """

    def __init__(self, path: Path, tunnel: Sequence[str] = ()) -> None:
        self._path, self._tunnel = path, tunnel
        self._sock: socket.socket | None = None
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def request(self, message: Message, timeout: float = _REPLY_TIMEOUT) -> Message:
        """The reply to a message; raises `OSError` where no run host replies in time."""
        with self._lock:
            try:
                if self._sock is None or self._channel is None:
                    self._sock = tunnelled(self._tunnel) if self._tunnel else connect(self._path, _REPLY_TIMEOUT)
                    self._channel = Channel(self._sock, passes_descriptors=not self._tunnel)
                    timeout += _TUNNEL_TIMEOUT if self._tunnel else 0.0
                self._sock.settimeout(timeout)
                return self._channel.request(message, Message, timeout)
            except OSError:
                self.close()
                raise

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
        self._sock = self._channel = None


def tunnelled(command: Sequence[str]) -> socket.socket:
    """A socket that is the standard input and output of a command, which ends with it."""
    near, far = socket.socketpair()
    with far:
        end = far.fileno()
        subprocess.Popen(command, stdin=end, stdout=end, stderr=subprocess.DEVNULL, start_new_session=True)
    return near


def job_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """The job that this process is in, and its node, for the status of a run; nothing outside of a job."""
    names = {"slurm_job": "SLURM_JOB_ID", "slurm_node": "SLURMD_NODENAME"}
    return {fact: environment[name] for fact, name in names.items() if environment.get(name)}


def tunnel_command(status: Mapping[str, Any]) -> list[str]:
    """The command that reaches the run host of a run with this status; none where that is on this machine, or in no job."""
    job, node = status.get("slurm_job"), status.get("slurm_node")
    if status.get("host") == socket.gethostname() or not (job and node) or shutil.which("srun") is None:
        return []
    return step_command(job, node, [sys.executable, "-m", __spec__.name, str(status["control"])])


def main() -> None:
    """Pass on standard input to the socket `sys.argv[1]`, and what comes back to standard output, until one of them ends."""
    sock = connect(Path(sys.argv[1]), _CONNECT_TIMEOUT)
    sock.settimeout(None)

    def pass_on_input() -> None:
        while data := os.read(0, _AT_ONCE):
            sock.sendall(data)
        sock.shutdown(socket.SHUT_RDWR)

    # it ends with this process, also where it waits for more
    threading.Thread(target=pass_on_input, name="accelerate_nb input", daemon=True).start()
    while data := sock.recv(_AT_ONCE):
        while data:
            data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
