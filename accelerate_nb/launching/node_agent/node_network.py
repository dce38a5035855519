"""A node as its agent finds it: its facts, the interface that routes to the other nodes, and what it can connect to."""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version

import psutil

from accelerate_nb.devices.probe import probe
from accelerate_nb.transport.messages import (
    ConnectToPeers,
    ListenToPeers,
    NetworkAddress,
    NodeFacts,
    PeerEndpoint,
    PeersReached,
)
from accelerate_nb.transport.worker_spec import INTERFACE_VARIABLES, LOOPBACK, on_interface


def facts_of_this_node(address: str) -> NodeFacts:
    """The facts of the machine that this process is on, which other nodes know by an address; torch is not imported."""
    devices = probe()
    return NodeFacts(
        host=socket.gethostname(),
        address=address,
        python=platform.python_version(),
        torch=_version("torch"),
        accelerate_nb=_version("accelerate_nb"),
        device_kind=devices.kind,
        device_label=devices.label,
        devices=devices.count,
        cores=devices.cores,
        time=time.time(),
    )


def clock_offset(facts: NodeFacts, sent: float, received: float) -> float:
    """By how many seconds the clock of a node is ahead, which was queried and has replied then; 0 where that is less than can be measured."""
    offset = facts.time - (sent + received) / 2
    return offset if abs(offset) > (received - sent) / 2 else 0.0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


# An address to which nothing is ever sent (RFC 5737): the route to it is that to everywhere.
_ANYWHERE = "192.0.2.1"
_MOST_CONNECTIONS = 64


class NodeNetwork:
    """The address of this node, and the socket at which other nodes reach it; `address` is the one at which it was reached."""

    def __init__(self, address: str = "") -> None:
        self.address = address or address_of_ssh(os.environ) or _route_to(_ANYWHERE) or LOOPBACK
        self._socket: socket.socket | None = None
        self._interface = ""

    def listen(self, request: ListenToPeers) -> PeerEndpoint:
        """Listen on the interface that routes to the peers, in place of a socket from before."""
        self.close()
        host = self._address_for(request.peers)
        try:
            family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, request.port), family=family, backlog=4096)
        except OSError as error:
            return PeerEndpoint(host, request.port, "", f"port {request.port} of {host} can't be had: {error.strerror}")
        self._interface = interface_of(host)
        return PeerEndpoint(host, self._socket.getsockname()[1], self._interface)

    def take_socket(self) -> socket.socket | None:
        """The socket that listens, which is the caller's from now on; connections that were made to try it are closed."""
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.setblocking(False)
            while True:
                try:
                    sock.accept()[0].close()
                except BlockingIOError:
                    break
            sock.setblocking(True)
        return sock

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables that have collectives use that interface; those that the environment has stay."""
        found = on_interface(self._interface) if self._interface else {}
        return {name: value for name, value in found.items() if name not in environment}

    def close(self) -> None:
        """Close the socket, where it was not taken."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _address_for(self, peers: Sequence[str]) -> str:
        for variable in INTERFACE_VARIABLES:
            if (name := os.environ.get(variable, "").partition(",")[0].lstrip("=^")) and (
                own := _addresses().get(name)
            ):
                return own[0]
        far = next((peer for peer in peers if not _is_loopback(peer)), None)
        return (far and _route_to(far)) or self.address


def connect(request: ConnectToPeers) -> PeersReached:
    """Connect to every endpoint for a moment; takes as long as the slowest."""
    with ThreadPoolExecutor(min(_MOST_CONNECTIONS, len(request.endpoints) or 1), "accelerate_nb connect") as threads:
        errors = list(threads.map(lambda endpoint: _connection_error(endpoint, request.timeout), request.endpoints))
    return PeersReached({str(index): error for index, error in enumerate(errors) if error})


def _connection_error(endpoint: NetworkAddress, timeout: float) -> str:
    try:
        socket.create_connection(endpoint, timeout).close()
    except TimeoutError:
        return f"nothing came back for {timeout:g} s, as from a firewall that drops packets"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def address_of_ssh(environment: Mapping[str, str]) -> str:
    """The address at which sshd was reached, in a process that it started; empty elsewhere."""
    words = environment.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else ""


def interface_of(address: str) -> str:
    """The name of the interface that has an address; empty where none has it."""
    return next((name for name, own in _addresses().items() if address in own), "")


def _addresses() -> dict[str, list[str]]:
    """The addresses of each interface, those of IPv4 first."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [item.address.partition("%")[0] for family in families for item in entries if item.family == family]
        for name, entries in psutil.net_if_addrs().items()
    }


def _route_to(peer: str) -> str:
    """The address of this machine that packets to a peer have; empty where there is no route. Nothing is sent."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, number) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def probe_connection(sock: socket.socket) -> None:
    """Have the system end a connection whose other machine is off or cut off, within 4 seconds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPALIVE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 4000),
    ):
        # those that this system has
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
