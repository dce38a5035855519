"""What is reserved in a Ray cluster for the nodes of a run: a placement group, with an agent in each of its bundles."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.joining.join_ticket import JoinTicket, new_token
from accelerate_nb.launching.joining.machine_listener import JoiningMachine, MachineListener
from accelerate_nb.launching.nodes.node_checks import print_notice
from accelerate_nb.launching.nodes.ray.agent_actor import AgentActor
from accelerate_nb.launching.nodes.ray.ray_cluster import node_name, nodes_table
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import MembershipGranted

# How long a placement group, or an agent, is waited for at a time, in seconds.
_ROUND = 1.0


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
        with MachineListener(ticket) as listener:
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

    nodes = _alive_nodes()
    wanted = _text(request)
    if not _can_hold(request, [node["Resources"] for node in nodes]):
        raise LaunchError(
            f"{wanted}, and the cluster at {request.cluster} has:\n{nodes_table(nodes)}\nRequest less, or add nodes."
        )
    made = placement_group(
        [{name: count for name, count in (("CPU", cpus), ("GPU", gpus)) if count} for cpus, gpus in request.bundles],
        strategy=request.strategy.upper(),
    )
    try:
        is_ready = _is_ready(made, timeout)
    except BaseException:
        remove_placement_group(made)
        raise
    if not is_ready:
        remove_placement_group(made)
        free = {name: count for name, count in ray.available_resources().items() if name in {"CPU", "GPU"}}
        raise LaunchError(
            f"{wanted}, and after {timeout:g} s the cluster at {request.cluster} still had no room: {free or 'nothing'} is free.\n"
            f"{nodes_table(nodes)}\nEnd what uses the rest, request less, or pass a longer join_timeout."
        )
    places, names = placement_group_table(made)["bundles_to_node_id"], _names_by_id()
    node_ids = [places[index] for index in range(len(request.bundles))]
    return NodeReservation(request, made, _distinct([names[node_id] for node_id in node_ids]), node_ids)


def _alive_nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _names_by_id() -> dict[str, str]:
    return {node["NodeID"]: node_name(node) for node in _alive_nodes()}


def _is_ready(placement_group: Any, timeout: float) -> bool:
    """Wait until the cluster has room; whether it has."""
    deadline, is_said = time.monotonic() + timeout, False
    while not placement_group.wait(_ROUND):
        if time.monotonic() > deadline:
            return False
        if not is_said:
            print_notice(f"The Ray cluster has no room yet; it is waited for up to {timeout:g} s.")
        is_said = True
    return True


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
