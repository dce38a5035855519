"""Agents on the nodes of a Ray cluster; what they reserve there is kept for the next launch of the same size."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.nodes.node_engine import PlacedAgent
from accelerate_nb.launching.nodes.node_placement import Host, node_sizes
from accelerate_nb.launching.nodes.node_pool import idle_nodes
from accelerate_nb.launching.nodes.ray.ray_cluster import RayConnection, connect, lasting_connection
from accelerate_nb.launching.nodes.ray.ray_reservation import NodeReservation, ReservationRequest, reserve

# How long an agent may take that starts again, in seconds.
_RESTART_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class RayNodes:
    """Places an agent as an actor of Ray, in what was reserved for its node under this number."""

    number: int

    label = "Ray"
    inherits_environment = True

    def place(self, node: str) -> PlacedAgent:
        """The agent of a node; raises `LaunchError` where it can't be started, or another run uses it."""
        reservation = _reservations.get().found.get(self.number)
        if reservation is None or node not in reservation.names:
            raise LaunchError(
                f"Workers on {node} were requested, whose place in the Ray cluster was given back. Launch again."
            )
        if node not in reservation.waiting:
            current = reservation.channels.get(node)
            if current is not None and not current.is_closed:
                raise LaunchError(f"Workers on {node} were requested, and another run uses its agent. Launch again.")
            reservation.start([node], _RESTART_TIMEOUT)
        return PlacedAgent(reservation.waiting.pop(node))

    def replacement(self, node: str) -> str | None:
        """The node to which Ray has moved what was reserved on a lost one; `None` where it finds no place for it."""
        reservation = _reservations.get().found.get(self.number)
        if reservation is None:
            return None
        try:
            return reservation.restart(node, _RESTART_TIMEOUT)
        except LaunchError:
            return None

    def advice(self, node: str) -> str:
        """Ray's own command."""
        return "Try `ray status` in a terminal"


# The nodes for which another process is to reserve.
UNRESERVED = RayNodes(-1)


@dataclass
class _Reservations:
    """What this process has reserved, by the numbers of its engines; one launch at a time looks for what it can use."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    found: dict[int, NodeReservation] = field(default_factory=dict)


_reservations: ContextVar[_Reservations] = ContextVar("accelerate_nb_ray_reservations", default=_Reservations())  # noqa: B039 - one for all threads


def reserve_ray_nodes(config: LaunchingConfig) -> tuple[RayNodes, tuple[Host, ...]]:
    """
    The nodes of a launch in a Ray cluster, with their agents; those of a former launch of the same size where no run uses them.

    Raises `LaunchError` where the cluster can't be reached, or hasn't what is requested; `MissingExtraError` without Ray.
    """
    connect(config.address)
    request = _request(config)
    reservations = _reservations.get()
    with reservations.lock:
        if (number := _usable(reservations, request)) is None:
            number = next(reservations.numbers)
            reservations.found[number] = _started(request, config.join_timeout)
        return RayNodes(number), tuple(Host(name) for name in reservations.found[number].names)


def connection_of_run_host(config: LaunchingConfig) -> RayConnection:
    """The connection for which a process that outlives this one reserves; what no run uses of this one's reservations is given back to it."""
    connection, reservations = lasting_connection(config.address), _reservations.get()
    with reservations.lock:
        _ = _usable(reservations, None)
    return connection


def _usable(reservations: _Reservations, request: ReservationRequest | None) -> int | None:
    """The number of what was reserved before for an equal request; what no run uses and has another size, or lost an agent, is given back."""
    for number, reservation in list(reservations.found.items()):
        idle = set(idle_nodes(RayNodes(number)))
        if reservation.request == request and idle == set(reservation.names):
            return number
        if all(name in idle or channel.is_closed for name, channel in reservation.channels.items()):
            del reservations.found[number]
            reservation.close()
    return None


def _started(request: ReservationRequest, timeout: float) -> NodeReservation:
    reservation = reserve(request, timeout)
    try:
        reservation.start(reservation.names, timeout)
    except BaseException:
        reservation.close()
        raise
    return reservation


def _request(config: LaunchingConfig) -> ReservationRequest:
    """A CPU for each thread of a rank, and a GPU a rank where as many nodes as requested have any."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = [] if config.cpu else sorted((int(node.get("GPU", 0)) for node in nodes), reverse=True)
    each = gpus[config.num_nodes - 1] if len(gpus) >= config.num_nodes else 0
    hosts = [Host(f"node {index}") for index in range(config.num_nodes)]
    sizes = node_sizes(config.num_processes, hosts, [each] * config.num_nodes)
    threads = config.num_cpu_threads_per_process or 1
    bundles = tuple((float(size * threads), float(size if each else 0)) for size in sizes)
    context = ray.get_runtime_context()
    return ReservationRequest(context.get_job_id(), context.gcs_address, bundles, config.placement_strategy, threads)
