"""The settings of a rendezvous of nodes: the endpoint, which node hosts it, and how long the nodes wait for each other."""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass, replace

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.errors import ConfigurationError, LaunchError, NotYetError
from accelerate_nb.launching.node_agent.node_network import interface_addresses, is_loopback
from accelerate_nb.launching.planning.placement import Placement, choose_placement

# The port of Accelerate's and torchrun's launchers, and torchrun's time for nodes to come, in seconds.
DEFAULT_PORT = 29500
_JOIN_TIMEOUT = 600.0
# Its time for more nodes to come than are needed, in seconds.
_LAST_CALL = 30.0
# A name that nobody knows may be new: for how long, and how often, it is looked up, in seconds.
_NAME_TIMEOUT, _BETWEEN_LOOKUPS = 5.0, 0.25
# The entries of rdzv_conf that torchrun has for that time, and those that mean something here.
_TIMEOUTS = ("join_timeout", "timeout")
_KNOWN = {*_TIMEOUTS, "last_call_timeout", "is_host", "rank"}


@dataclass(frozen=True, slots=True)
class RendezvousSettings:
    """The place and the terms of a rendezvous; `node_rank` is `None` where nodes get their ranks in the order in which they come."""

    host: str
    port: int
    nodes: int
    node_rank: int | None
    run_id: str
    timeout: float = _JOIN_TIMEOUT
    is_host: bool | None = None
    min_nodes: int | None = None
    last_call: float = _LAST_CALL

    @classmethod
    def of(cls, config: LaunchingConfig) -> RendezvousSettings:
        """The settings of a configuration; raises `ConfigurationError` where the endpoint or rdzv_conf can't be understood."""
        host, port = config.master_addr, ""
        if config.rdzv_endpoint.strip():
            host, port = split_endpoint(config.rdzv_endpoint)
        if port and not (port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigurationError(
                f"rdzv_endpoint={config.rdzv_endpoint.strip()!r} was given, and {port!r} is no port. Pass HOST:PORT."
            )
        conf = dict(config.rdzv_conf or {})
        if unknown := sorted(conf.keys() - _KNOWN):
            raise ConfigurationError(
                f"rdzv_conf has {', '.join(unknown)}, which mean nothing here. It takes {', '.join(sorted(_KNOWN))}; leave out the others."
            )
        timeout = next((conf[name] for name in _TIMEOUTS if name in conf), _JOIN_TIMEOUT)
        is_host = conf.get("is_host")
        try:
            return cls(
                host=host,
                port=int(port or config.use_port or DEFAULT_PORT),
                nodes=config.num_nodes,
                node_rank=int(conf.get("rank", config.node_rank)) if config.rdzv_backend == "static" else None,
                run_id=config.rdzv_id,
                timeout=float(timeout),
                is_host=None if is_host is None else str(is_host).lower() in {"1", "true", "yes", "t", "y"},
                min_nodes=config.min_nodes,
                last_call=float(conf.get("last_call_timeout", _LAST_CALL)),
            )
        except ValueError:
            raise ConfigurationError(
                f"rdzv_conf={conf!r} was given, of which a value is no number. Pass seconds."
            ) from None

    @property
    def endpoint(self) -> str:
        """The endpoint as a person writes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def advice(self) -> str:
        """What to do about nodes that do not find each other."""
        if is_loopback(self.host):
            return (
                f"{self.host} is this machine alone: pass master_addr, the address of node 0 as the other nodes reach it, unless all nodes "
                "are launched here"
            )
        return (
            f"launch it on each of the {self.nodes} nodes with the same endpoint (master_addr and use_port, or rdzv_endpoint), and let a "
            f"firewall of node 0 pass port {self.port}"
        )


def local_placement(config: RunConfig, devices: AvailableDevices) -> Placement:
    """The placement of this node's ranks; pure. Raises `LaunchError` where they don't fit this machine."""
    settings = RendezvousSettings.of(config.launching)
    placement = choose_placement(config, devices, can_fork=hasattr(os, "fork"))
    if placement.kind == "xla":
        raise NotYetError(
            f"num_nodes={settings.nodes} was requested on XLA devices, which is not offered here yet. Launch it on one machine."
        )
    rank = "a node" if settings.node_rank is None else f"node {settings.node_rank}"
    return replace(
        placement, why=f"{placement.why}; {rank} of {settings.nodes}, by the rendezvous at {settings.endpoint}"
    )


def check_name(settings: RendezvousSettings) -> None:
    """Raise `LaunchError` where no host has the endpoint's name, and none gets it within some seconds: none will come by it."""
    deadline = time.monotonic() + min(_NAME_TIMEOUT, settings.timeout)
    while True:
        try:
            socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno != socket.EAI_NONAME:
                return
            if time.monotonic() < deadline:
                time.sleep(_BETWEEN_LOOKUPS)
                continue
            raise LaunchError(
                f"A run of {settings.nodes} nodes was requested at {settings.endpoint}, and there is no host of that name: "
                f"{error.strerror}. Pass an address or a name that all nodes know as master_addr (or rdzv_endpoint)."
            ) from None
        return


def hosts(settings: RendezvousSettings) -> bool:
    """Whether this node is to host the rendezvous: node 0, or one that has the endpoint's address."""
    if settings.node_rank is not None:
        return settings.node_rank == 0
    if settings.is_host is not None:
        return settings.is_host
    return bool(_own_addresses() & set(resolved_host(settings.host)))


def listen(settings: RendezvousSettings) -> socket.socket | None:
    """A socket that listens at the endpoint; `None` where another node of this machine has it, and any may host; raises `LaunchError`."""
    # on the interface that has its address, or on all where none has: behind a translation of addresses
    found = [address for address in resolved_host(settings.host) if address in _own_addresses()]
    # names of a machine itself are often one of its loopback addresses, which no other machine reaches
    reachable = [address for address in found if is_loopback(settings.host) or not is_loopback(address)]
    address = reachable[0] if reachable else ""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, settings.port), family=family, backlog=4096)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and settings.node_rank is None:
            return None
        raise LaunchError(
            f"A run of {settings.nodes} nodes was requested, which meet at {settings.endpoint}, and this node can't listen there: "
            f"{error.strerror}. Pass another use_port (or rdzv_endpoint) on all nodes, or end what has that port."
        ) from None


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


def _own_addresses() -> set[str]:
    # all of 127.0.0.0/8 is this machine
    return {"127.0.1.1"}.union(*interface_addresses().values())
