"""Agents on the nodes of a Ray cluster: the connection to it, what is reserved there and kept for the next launch of the same size, and the actor of each node."""

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.errors import LaunchError, MissingExtraError, NotYetError
from accelerate_nb.launching.node_agent.agent_process import JoinedAgent, JoinTicket, new_token
from accelerate_nb.launching.node_agent.node_network import is_loopback, print_notice, resolved_host, split_endpoint
from accelerate_nb.launching.nodes.joined_machines import JoiningMachine, MachineListener
from accelerate_nb.launching.nodes.node_pool import NodeEngine, PlacedAgent, idle_nodes
from accelerate_nb.launching.planning.placement import Host, node_sizes
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import MembershipGranted

_CONNECT_TIMEOUT = 5.0
# How long a placement group, or an agent, is waited for at a time, in seconds.
_ROUND = 1.0
# How long an agent may take that starts again, in seconds.
_RESTART_TIMEOUT = 60.0


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
            # where nothing listens, Ray itself would try for a quarter of an hour
            host, _, port = self.address.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT).close()
            except (OSError, ValueError) as error:
                raise LaunchError(
                    f"address={self.address!r} was requested, and no Ray cluster can be reached there: {error}. Pass the HOST:PORT that "
                    "`ray start --head` has shown, or leave address out for a local Ray."
                ) from None
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
    if address in {"", "auto", found} or (address == "local" and _has_started_ray()):
        return True
    host, port = split_endpoint(address)
    hosts = [ray.util.get_node_ip_address()] if is_loopback(host) else resolved_host(host)
    if found not in {f"{name}:{port}" for name in hosts}:
        raise LaunchError(
            f"address={address!r} was requested, and this process is connected to {found}. Leave address out, or call ray.shutdown()."
        )
    return True


def _has_started_ray() -> bool:
    """Whether this process has started the cluster that it is connected to, which ends with it."""
    from ray._private import worker

    # Ray has no public name for it
    node = worker.global_worker.node
    return node is not None and node.is_head()


def nodes_table(nodes: Sequence[dict[str, Any]]) -> str:
    """The nodes of a cluster, as `ray.nodes()` gives them, with what each has; a line a node."""
    return "\n".join(
        f"  {node_name(node)}  {node['Resources'].get('CPU', 0):g} CPU, {node['Resources'].get('GPU', 0):g} GPU"
        for node in sorted(nodes, key=node_name)
    )


def node_name(node: dict[str, Any]) -> str:
    """The name that a node was given, or its address."""
    return str(node.get("NodeName") or node["NodeManagerAddress"])


@dataclass(frozen=True, slots=True)
class ReservationRequest:
    """What is reserved: equal requests can share a placement group, one after the other."""

    job: str
    cluster: str
    bundles: tuple[tuple[float, float], ...]
    strategy: str
    threads: int


@dataclass
class NodeReservation:
    """A placement group, with its actors by the names of nodes; `node_ids` are Ray's names of the nodes, in the order of bundles."""

    request: ReservationRequest
    placement_group: Any
    names: tuple[str, ...]
    node_ids: list[str]
    actors: dict[str, Any] = field(default_factory=dict)
    channels: dict[str, Channel] = field(default_factory=dict)
    waiting: dict[str, Channel] = field(default_factory=dict)

    def start(self, names: Sequence[str], timeout: float) -> None:
        """Start the agents of these nodes, and wait until they have connected; raises `LaunchError`."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if not ray.is_initialized():
            # the calls below would make another connection
            raise LaunchError(
                f"Agents on {', '.join(names)} were requested of Ray, which this process has left. Launch again."
            )
        ticket = JoinTicket(new_token(), ray.util.get_node_ip_address(), 0)
        deadline = time.monotonic() + timeout
        with closing(MachineListener(ticket)) as listener:
            serving = {}
            for name in names:
                index = self.names.index(name)
                cpus, gpus = self.request.bundles[index]
                if (before := self.actors.pop(name, None)) is not None:
                    ray.kill(before)
                options = {
                    "num_cpus": cpus,
                    "num_gpus": gpus,
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(self.placement_group, index),
                }
                self.actors[name] = ray.remote(AgentActor).options(**options).remote()
                serving[self.actors[name].serve.remote(str(listener.ticket), index, self.request.threads)] = name
            left = set(names)
            while left:
                for machine in listener.wait(_ROUND):
                    left.discard(self._admit(machine))
                for reference in ray.wait(list(serving), timeout=0)[0]:
                    if serving[reference] in left:
                        _raise_failed(reference, serving[reference])
                if left and not _can_hold(self.request, [node["Resources"] for node in _alive_nodes()]):
                    raise LaunchError(
                        f"{_text(self.request)}, and the cluster has lost {', '.join(sorted(left))} since."
                    )
                if left and time.monotonic() > deadline:
                    raise LaunchError(
                        f"Agents on {', '.join(names)} were requested of Ray, and {', '.join(sorted(left))} did not connect to "
                        f"{listener.ticket.endpoint} within {timeout:g} s. Let the nodes connect to this machine, or pass a longer join_timeout."
                    )

    def restart(self, name: str, timeout: float) -> str:
        """Start the agent of a lost node again, where Ray has its bundle by now; returns the node's name, and raises `LaunchError`."""
        index = self.names.index(name)
        before = self.node_ids[index]
        try:
            self.start([name], timeout)
        except LaunchError:
            if before in {node["NodeID"] for node in _alive_nodes()}:
                raise
            # Ray notices some seconds later that a node is lost, and had started it there
            self.start([name], timeout)
        if self.node_ids[index] == before:
            return name
        others = [item for item in self.names if item != name]
        new = _distinct([*others, _names_by_id()[self.node_ids[index]]])[-1]
        for found in (self.actors, self.channels, self.waiting):
            found[new] = found.pop(name)
        self.names = tuple(new if item == name else item for item in self.names)
        return new

    def _admit(self, machine: JoiningMachine) -> str:
        """Take an agent, which has sent the number of its bundle and the node's id; returns the node's name."""
        number, _, node_id = machine.name.partition(" ")
        name = self.names[int(number)]
        self.node_ids[int(number)] = node_id
        machine.channel.try_send(MembershipGranted(name))
        self.channels[name] = self.waiting[name] = machine.channel
        return name

    def close(self) -> None:
        """End its actors, and give back what it reserved."""
        import ray
        from ray.util import remove_placement_group

        if not ray.is_initialized():
            # all of it went with the connection, and these calls would make another one
            return
        with suppress(Exception):  # the cluster may have gone
            for actor in self.actors.values():
                ray.kill(actor)
            remove_placement_group(self.placement_group)


def _raise_failed(reference: Any, name: str) -> None:
    import ray

    try:
        ray.get(reference)
        reason = "it has ended"
    except Exception as error:  # noqa: BLE001 - whatever Ray says of it
        reason = str(error).strip()
    raise LaunchError(
        f"An agent on {name} was requested of Ray, and it did not start: {reason}\nEvery node needs this environment, "
        "accelerate_nb too, or a runtime environment that has it."
    )


def reserve(request: ReservationRequest, timeout: float) -> NodeReservation:
    """Reserve what is requested, within so many seconds; raises `LaunchError` where the cluster hasn't so much."""
    import ray
    from ray.util import placement_group, placement_group_table, remove_placement_group

    _check_size(request)
    made = placement_group(
        [{name: count for name, count in (("CPU", cpus), ("GPU", gpus)) if count} for cpus, gpus in request.bundles],
        strategy=request.strategy.upper(),
    )
    deadline, is_said = time.monotonic() + timeout, False
    try:
        while not (is_ready := made.wait(_ROUND)) and time.monotonic() <= deadline:
            if not is_said:
                print_notice(f"The Ray cluster has no room yet; it is waited for up to {timeout:g} s.")
            is_said = True
            # nodes may leave it meanwhile
            _check_size(request)
    except BaseException:
        remove_placement_group(made)
        raise
    if not is_ready:
        remove_placement_group(made)
        free = {name: count for name, count in ray.available_resources().items() if name in {"CPU", "GPU"}}
        raise LaunchError(
            f"{_text(request)}, and after {timeout:g} s the cluster at {request.cluster} still had no room: {free or 'nothing'} is free.\n"
            f"{nodes_table(_alive_nodes())}\nEnd what uses the rest, request less, or pass a longer join_timeout."
        )
    places, names = placement_group_table(made)["bundles_to_node_id"], _names_by_id()
    node_ids = [places[index] for index in range(len(request.bundles))]
    return NodeReservation(request, made, _distinct([names[node_id] for node_id in node_ids]), node_ids)


def _check_size(request: ReservationRequest) -> None:
    """Raise `LaunchError` where the cluster could not hold what is requested if nothing else ran there."""
    nodes = _alive_nodes()
    if not _can_hold(request, [node["Resources"] for node in nodes]):
        raise LaunchError(
            f"{_text(request)}, and the cluster at {request.cluster} has:\n{nodes_table(nodes)}\nRequest less, or add nodes."
        )


def _alive_nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _names_by_id() -> dict[str, str]:
    return {node["NodeID"]: node_name(node) for node in _alive_nodes()}


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Names of agents: those that share a node are numbered."""
    return tuple(
        name if names.count(name) == 1 else f"{name}-{names[:index].count(name) + 1}"
        for index, name in enumerate(names)
    )


def _can_hold(request: ReservationRequest, nodes: Sequence[dict[str, float]]) -> bool:
    """Whether the cluster could hold the bundles if nothing else ran there, the largest placed first."""
    free = sorted(([node.get("CPU", 0.0), node.get("GPU", 0.0)] for node in nodes), reverse=True)
    for cpus, gpus in sorted(request.bundles, reverse=True):
        place = next((node for node in free if node[0] >= cpus and node[1] >= gpus), None)
        if place is None:
            return False
        if request.strategy == "strict_spread":
            free.remove(place)
        else:
            place[0] -= cpus
            place[1] -= gpus
    return True


def _text(request: ReservationRequest) -> str:
    parts = [f"{cpus:g} CPU" + (f" + {gpus:g} GPU" if gpus else "") for cpus, gpus in request.bundles]
    what = f"{parts[0]} each" if len(set(parts)) == 1 else ", ".join(parts)
    how = (
        "every one on a machine of its own" if request.strategy == "strict_spread" else "on as few machines as possible"
    )
    return f"engine='ray' was requested on {len(parts)} nodes with {what}, {how}"


class AgentActor:
    """An agent that connects back to the process that launches, and serves it until that ends."""

    def serve(self, ticket: str, bundle: int, threads: int) -> None:
        """Serve in the bundle of this number; each rank computes with so many threads, unless the runtime environment says otherwise."""
        import ray

        # Ray has set that to the number of cores of the whole actor
        if "OMP_NUM_THREADS" not in ray.get_runtime_context().runtime_env.get("env_vars", {}):
            os.environ["OMP_NUM_THREADS"] = str(threads)
        # where this bundle is now: after a loss Ray moves it
        name = f"{bundle} {ray.get_runtime_context().get_node_id()}"
        JoinedAgent(JoinTicket.parse(ticket), name).serve()


@dataclass(frozen=True, slots=True)
class RayNodes(NodeEngine):
    """Places an agent as an actor of Ray, in what was reserved for its node under this number."""

    number: int

    label = "Ray"

    def place(self, node: str) -> PlacedAgent:
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
    """The nodes of a launch in a Ray cluster with their agents, of a former launch of the same size where they are free; raises `LaunchError`."""
    if not _is_connected(config.address):
        RayConnection(config.address).open()
    request = _request(config)
    reservations = _reservations.get()
    with reservations.lock:
        if (number := _usable(reservations, request)) is None:
            reservation = reserve(request, config.join_timeout)
            try:
                reservation.start(reservation.names, config.join_timeout)
            except BaseException:
                reservation.close()
                raise
            number = next(reservations.numbers)
            reservations.found[number] = reservation
        return RayNodes(number), tuple(Host(name) for name in reservations.found[number].names)


def connection_of_run_host(config: LaunchingConfig) -> RayConnection:
    """The connection for which a process that outlives this one reserves; raises `LaunchError` where this process has started its Ray."""
    connection = RayConnection(config.address)
    if _is_connected(config.address):
        import ray

        if _has_started_ray():
            raise LaunchError(
                "detach=True was requested, and this process is connected to a Ray that it has started, which ends with it. Call ray.shutdown(), "
                "and leave address out for a local Ray of the run's own; or start one that stays, `ray start --head` in a terminal, and pass "
                "address='auto'."
            )
        context = ray.get_runtime_context()
        connection = RayConnection(context.gcs_address, dict(context.runtime_env))
    reservations = _reservations.get()
    with reservations.lock:
        # what no run uses of this process's own is given back to the cluster
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


def _request(config: LaunchingConfig) -> ReservationRequest:
    """A CPU for each thread of a rank, and a GPU a rank where as many nodes as requested have any."""
    import ray

    nodes = [node["Resources"] for node in _alive_nodes()]
    gpus = [] if config.cpu else sorted((int(node.get("GPU", 0)) for node in nodes), reverse=True)
    each = gpus[config.num_nodes - 1] if len(gpus) >= config.num_nodes else 0
    hosts = [Host(f"node {index}") for index in range(config.num_nodes)]
    sizes = node_sizes(config.num_processes, hosts, [each] * config.num_nodes)
    threads = config.num_cpu_threads_per_process or 1
    bundles = tuple((float(size * threads), float(size if each else 0)) for size in sizes)
    context = ray.get_runtime_context()
    return ReservationRequest(context.get_job_id(), context.gcs_address, bundles, config.placement_strategy, threads)
