"""The Ray cluster that this process is connected to."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Any

from accelerate_nb.errors import LaunchError, MissingExtraError, NotYetError
from accelerate_nb.launching.rendezvous.peers import print_notice

_CONNECT_TIMEOUT = 5.0


def connect(address: str) -> None:
    """Connect this process to the cluster; one that is connected stays so."""
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
    if ray.is_initialized():
        found = ray.get_runtime_context().gcs_address
        if address not in {"", "auto", found}:
            raise LaunchError(
                f"address={address!r} was requested, and this process is connected to {found}. Leave address out, or call ray.shutdown()."
            )
        return
    if not address:
        print_notice("A local Ray is started, which takes some 10 seconds. Pass address to use a cluster.")
    elif address not in {"auto", "local"}:
        _check_reach(address)
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"address={address!r} was requested, and Ray can't connect: {error}. See `ray status` on this machine, which has to be one "
            "of the cluster's nodes."
        ) from None


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
