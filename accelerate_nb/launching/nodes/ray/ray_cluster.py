"""The Ray cluster that this process is connected to."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate_nb.errors import LaunchError, MissingExtraError, NotYetError
from accelerate_nb.launching.nodes.node_checks import print_notice

_CONNECT_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class RayConnection:
    """The way to a Ray cluster: its address, "" for a local Ray that is started, and the runtime environment of what runs there."""

    address: str
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def open(self) -> None:
        """Connect this process, which is not connected; raises `LaunchError`."""
        import ray

        if not self.address:
            print_notice("A local Ray is started, which takes some 10 seconds. Pass address to use a cluster.")
        elif self.address not in {"auto", "local"}:
            _check_reach(self.address)
        try:
            ray.init(
                address=self.address or "local",
                runtime_env=dict(self.runtime_env) or None,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise LaunchError(
                f"address={self.address!r} was requested, and Ray can't connect: {error}. See `ray status` on this machine, which has to be "
                "one of the cluster's nodes."
            ) from None


def connect(address: str) -> None:
    """Connect this process to the cluster; one that is connected stays so."""
    if not _is_connected(address):
        RayConnection(address).open()


def lasting_connection(address: str) -> RayConnection:
    """
    The connection that a process which outlives this one is to make; it has the runtime environment of this one's.

    Raises `LaunchError` where this process has started the Ray that it is connected to.
    """
    if not _is_connected(address):
        return RayConnection(address)
    import ray
    from ray._private import worker

    # Ray has no public name for it
    node = worker.global_worker.node
    if node is not None and node.is_head():
        raise LaunchError(
            "detach=True was requested, and this process is connected to a Ray that it has started, which ends with it. Call ray.shutdown(), and "
            "leave address out for a local Ray of the run's own; or start one that stays, `ray start --head` in a terminal, and pass address='auto'."
        )
    context = ray.get_runtime_context()
    return RayConnection(context.gcs_address, dict(context.runtime_env))


def _is_connected(address: str) -> bool:
    """Whether this process is connected to a cluster, which is that of the address; raises `LaunchError` where it is another."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            "engine='ray' was requested, and Ray is not installed: pip install 'accelerate-nb[ray]'"
        ) from error
    if address.startswith("ray://"):
        raise NotYetError(
            f"address={address!r} was requested, and Ray's client is not offered here yet. Run the notebook on a node of the cluster, "
            "and pass HOST:PORT, or 'auto'."
        )
    if not ray.is_initialized():
        return False
    found = ray.get_runtime_context().gcs_address
    if address not in {"", "auto", found}:
        raise LaunchError(
            f"address={address!r} was requested, and this process is connected to {found}. Leave address out, or call ray.shutdown()."
        )
    return True


def _check_reach(address: str) -> None:
    """Raise `LaunchError` where nothing listens there: Ray itself would try for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT).close()
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"address={address!r} was requested, and no Ray cluster can be reached there: {error}. Pass the HOST:PORT that `ray start --head` "
            "has shown, or leave address out for a local Ray."
        ) from None


def nodes_table(nodes: Sequence[dict[str, Any]]) -> str:
    """The nodes of a cluster, as `ray.nodes()` gives them, with what each has; a line a node."""
    return "\n".join(
        f"  {node_name(node)}  {node['Resources'].get('CPU', 0):g} CPU, {node['Resources'].get('GPU', 0):g} GPU"
        for node in sorted(nodes, key=node_name)
    )


def node_name(node: dict[str, Any]) -> str:
    """The name that a node was given, or its address."""
    return str(node.get("NodeName") or node["NodeManagerAddress"])
