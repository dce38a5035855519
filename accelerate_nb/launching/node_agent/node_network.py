"""The network between nodes: the facts and the interface of this one, and whether the nodes of a run fit and can connect to each other."""

import ipaddress
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

import psutil

from accelerate_nb.devices.probe import probe
from accelerate_nb.devices.xla import installed_version
from accelerate_nb.errors import LaunchError
from accelerate_nb.reports.text_format import aligned
from accelerate_nb.transport import messages
from accelerate_nb.transport.channel import Reply
from accelerate_nb.transport.worker_spec import INTERFACE_VARIABLES, LOOPBACK, NetworkAddress, on_interface


def facts_of_this_node(address: str) -> messages.NodeFacts:
    """The facts of the machine that this process is on, which other nodes know by an address; torch is not imported."""
    devices = probe()
    return messages.NodeFacts(
        host=socket.gethostname(),
        address=address,
        python=platform.python_version(),
        torch=installed_version("torch") or "",
        accelerate_nb=installed_version("accelerate_nb") or "",
        device_kind=devices.kind,
        device_label=devices.label,
        devices=devices.count,
        cores=devices.cores,
        time=time.time(),
    )


# An address to which nothing is ever sent (RFC 5737): the route to it is that to everywhere.
_ANYWHERE = "192.0.2.1"
_MOST_CONNECTIONS = 64


class NodeNetwork:
    """The address of this node, and the socket at which other nodes reach it; `address` is the one at which it was reached."""

    def __init__(self, address: str = "") -> None:
        # the third word is that at which sshd was reached, in a process that it started
        ssh = os.environ.get("SSH_CONNECTION", "").split()
        self.address = address or (ssh[2] if len(ssh) == 4 else "") or _route_to(_ANYWHERE) or LOOPBACK
        self._socket: socket.socket | None = None
        self._interface = ""

    def listen(self, request: messages.ListenToPeers) -> messages.PeerEndpoint:
        """Listen on the interface that routes to the peers, in place of a socket from before."""
        self.close()
        addresses = interface_addresses()
        named = [os.environ.get(variable, "").partition(",")[0].lstrip("=") for variable in INTERFACE_VARIABLES]
        chosen = next((addresses[name][0] for name in named if addresses.get(name)), "")
        far = next((peer for peer in request.peers if not is_loopback(peer)), None)
        host = chosen or (far and _route_to(far)) or self.address
        try:
            family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, request.port), family=family, backlog=4096)
        except OSError as error:
            return messages.PeerEndpoint(
                host, request.port, "", f"port {request.port} of {host} can't be had: {error.strerror}"
            )
        self._interface = interface_of(host)
        return messages.PeerEndpoint(host, self._socket.getsockname()[1], self._interface)

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
        return interface_variables(self._interface, environment)

    def close(self) -> None:
        """Close the socket, where it was not taken."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def interface_variables(interface: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that have collectives use an interface, where there is one; those that the environment has stay."""
    found = on_interface(interface) if interface else {}
    return {name: value for name, value in found.items() if name not in environment}


def connect(request: messages.ConnectToPeers) -> messages.PeersReached:
    """Connect to every endpoint for a moment; takes as long as the slowest."""

    def connection_error(endpoint: NetworkAddress) -> str:
        try:
            socket.create_connection(endpoint, request.timeout).close()
        except TimeoutError:
            return f"nothing came back for {request.timeout:g} s, as from a firewall that drops packets"
        except OSError as error:
            return error.strerror or str(error)
        return ""

    with ThreadPoolExecutor(min(_MOST_CONNECTIONS, len(request.endpoints) or 1), "accelerate_nb connect") as threads:
        errors = list(threads.map(connection_error, request.endpoints))
    return messages.PeersReached({str(index): error for index, error in enumerate(errors) if error})


def interface_of(address: str) -> str:
    """The name of the interface that has an address; empty where none has it."""
    return next((name for name, own in interface_addresses().items() if address in own), "")


def interface_addresses() -> dict[str, list[str]]:
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


def is_loopback(address: str) -> bool:
    """Whether an address, or a name, is of this machine alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address in {"", "localhost"}


def split_endpoint(text: str) -> tuple[str, str]:
    """The host and the port of a text, the latter empty where it has none: an address of IPv6 stands in brackets before one."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        host, port = text.strip(), ""
    return host.strip("[]"), port


def resolved_host(host: str) -> list[str]:
    """The addresses of a host's name; none where nobody knows it."""
    try:
        return list(dict.fromkeys(str(item[4][0]) for item in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    except OSError:
        return []


def probe_connection(sock: socket.socket) -> None:
    """Have a new connection wait without a limit, and the system end it within 4 seconds where its other machine is off or cut off."""
    # whatever `socket.setdefaulttimeout` has
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = {"TCP_KEEPIDLE": 1, "TCP_KEEPALIVE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 4000}
    for name, value in probes.items():
        # those that this system has
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# What is said of a wait, comes after so many seconds.
_QUIET_WAIT = 2.0


class WaitNotice:
    """Says on standard error what is waited for, once that takes some seconds, and again whenever it changes."""

    def __init__(self) -> None:
        self._began, self._said = time.monotonic(), ""

    def say(self, text: str) -> None:
        """Say it, unless it was said."""
        if time.monotonic() - self._began > _QUIET_WAIT and text != self._said:
            self._said = text
            print_notice(text)


def print_notice(text: str) -> None:
    """Write what is waited for on standard error, at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


Result = TypeVar("Result")

# How long an agent may take to reply that has replied before, in seconds.
REPLY_TIMEOUT = 8.0
# How long a node may take to connect to another one, in seconds.
_CONNECT_TIMEOUT = 4.0
# Each node tries to connect to that of rank 0, and to so many that follow it.
_NEIGHBOURS = 8
# A wait that a person may interrupt is made of waits of so many seconds: an interrupt that comes right before Python begins to wait
# is noticed at the end of that one.
BETWEEN_INTERRUPT_CHECKS = 0.5


class RequestedNode(Protocol):
    """A node that carries out requests."""

    @property
    def name(self) -> str:
        """Its name for people."""

    def request(self, message: messages.Message, reply_class: type[Reply], timeout: float) -> Reply:
        """Send a message, and wait for its reply; raises `LaunchError` where none comes."""


def endpoint_of(node: RequestedNode, request: messages.ListenToPeers) -> messages.PeerEndpoint:
    """Have a node listen to the others; raises `LaunchError` where it can't."""
    endpoint = node.request(request, messages.PeerEndpoint, REPLY_TIMEOUT)
    if endpoint.error:
        raise LaunchError(
            f"A run on {node.name} was requested, and it can't listen to the other nodes: {endpoint.error}. "
            "Leave use_port out, or set GLOO_SOCKET_IFNAME there to the interface between the nodes."
        )
    return endpoint


def check_reach(nodes: Sequence[RequestedNode], endpoints: Sequence[messages.PeerEndpoint]) -> None:
    """Check that each node can connect to others at their endpoints, as their collectives have to; raises `LaunchError` with what can't."""

    def errors(index: int) -> list[str]:
        following = ((index + step) % len(endpoints) for step in range(1, min(_NEIGHBOURS + 1, len(endpoints))))
        targets = list(dict.fromkeys(other for other in (0, *following) if other != index))
        request = messages.ConnectToPeers(
            tuple(NetworkAddress(endpoints[other].host, endpoints[other].port) for other in targets), _CONNECT_TIMEOUT
        )
        reply = nodes[index].request(request, messages.PeersReached, _CONNECT_TIMEOUT + REPLY_TIMEOUT)
        return [
            f"{nodes[index].name} can't connect to port {endpoint.port} of {nodes[target].name} ({endpoint.host}, {endpoint.interface}): "
            f"{reply.errors[str(place)]}"
            for place, target in enumerate(targets)
            for endpoint in endpoints[target : target + 1]
            if str(place) in reply.errors
        ]

    found = [error for reply in of_all(errors, range(len(nodes))) for error in reply]
    if found:
        lines = "\n".join(f"- {error}" for error in found)
        raise LaunchError(
            f"A run on {len(nodes)} nodes was requested, whose ranks have to connect to each other at ports of any number, and:\n"
            f"{lines}\nOpen those ports between the nodes, or set GLOO_SOCKET_IFNAME there to an interface that reaches the others."
        )


def of_all(
    call: Callable[..., Result], items: Sequence[object], cancel: Callable[[], object] = lambda: None
) -> list[Result]:
    """The results of a call for each item, made at the same time; raises the first error, once all have ended."""
    if len(items) == 1:
        return [call(items[0])]
    with ThreadPoolExecutor(len(items), "accelerate_nb node") as threads:
        try:
            calls = [threads.submit(call, item) for item in items]
            while wait(calls, BETWEEN_INTERRUPT_CHECKS).not_done:
                pass
        except KeyboardInterrupt:
            # the calls end, which would be waited for
            cancel()
            raise
    return [done.result() for done in calls]


def check_versions(here: messages.NodeFacts, nodes: Mapping[str, messages.NodeFacts]) -> None:
    """Check that all nodes have this process's Python (X.Y), torch (without its build) and package; raises `LaunchError` with a table."""
    expected = _comparable(here)
    differing = {name for name, facts in nodes.items() if _comparable(facts) != expected}
    if differing:
        cells: list[tuple[str, ...]] = [("", "Python", "torch", "accelerate_nb")]
        for name, facts in {"this process": here, **nodes}.items():
            marked = f"{name} (differs)" if name in differing else name
            cells.append((marked, facts.python, facts.torch or "not installed", facts.accelerate_nb))
        table = "\n".join(aligned(cells))
        raise LaunchError(
            f"A run on {', '.join(nodes)} was requested, and {', '.join(sorted(differing))} "
            f"{'has' if len(differing) == 1 else 'have'} other versions than this process:\n\n{table}\n\n"
            "Install the same versions there, or name a Python that has them as node_python."
        )


def _comparable(facts: messages.NodeFacts) -> tuple[str, ...]:
    python = ".".join(facts.python.split(".")[:2])
    return python, facts.torch.partition("+")[0], facts.accelerate_nb
