"""Freeing a rank that waits for others inside compiled code: the connections between the ranks are cut."""

import contextlib
import os
import socket
import sys
from collections.abc import Collection, Iterator
from pathlib import Path


def cut_connections(others: Collection[int], *, store_port: int) -> None:
    """Cut this process's TCP connections to the processes `others`, but for those to the store of the rendezvous."""
    # A collective of gloo that waits raises on both sides, at once: nothing else ends it (torch's `abort` does so for
    # NCCL alone). Where /proc does not show whose a connection is, all within this machine are cut. Of those to ranks
    # on other machines, each side cuts the ones that it has accepted: one of two ranks has
    # (gloo/transport/tcp/pair.cc).
    has_ranks_elsewhere = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
    theirs, listening = _inodes(others), _listening_ports() if has_ranks_elsewhere else set()
    for connection in _connections():
        with connection, contextlib.suppress(OSError):
            near, far = connection.getsockname(), connection.getpeername()
            if store_port in (near[1], far[1]):
                continue
            is_local = near[0] == far[0] and (theirs is None or _inode_at(far[1], near[1]) in theirs)
            if is_local or near[1] in listening:
                connection.shutdown(socket.SHUT_RDWR)


def cut_from_store(port: int) -> None:
    """Cut this process off from the store of the rendezvous: a wait for a key there raises."""
    for connection in _connections():
        with connection, contextlib.suppress(OSError):
            if connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)


def abort_devices() -> None:
    """Have collectives that wait on devices end with an error."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return
    for group, (backend, _) in list(c10d._world.pg_map.items()):
        if "nccl" in str(backend):
            with contextlib.suppress(RuntimeError):
                group.abort()


def _connections() -> Iterator[socket.socket]:
    """Copies of this process's TCP sockets."""
    for name in os.listdir("/dev/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            # closed meanwhile
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            # something else than a socket
            os.close(copy)
            continue
        if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
            yield sock
        else:
            sock.close()


def _listening_ports() -> set[int]:
    """The ports at which this process accepts connections."""
    ports = set()
    for sock in _connections():
        with sock, contextlib.suppress(OSError):
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(sock.getsockname()[1])
    return ports


def _inodes(pids: Collection[int]) -> set[str] | None:
    """The sockets of processes, as /proc names them."""
    if sys.platform != "linux":
        return None
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    kind, _, inode = os.readlink(entry).partition(":[")
                    if kind == "socket":
                        found.add(inode.rstrip("]"))
    return found


def _inode_at(local: int, remote: int) -> str | None:
    """The socket between these two ports of this machine (proc(5): columns are local and remote address, and the tenth is the inode)."""
    near, far = f":{local:04X}", f":{remote:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[1].endswith(near) and columns[2].endswith(far):
                    return columns[9]
    return None
