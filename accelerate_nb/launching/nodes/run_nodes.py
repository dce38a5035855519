"""The nodes of a run, found before anything of it starts, and from one attempt to the next: after a loss others take part."""

from __future__ import annotations

import os
import shlex
import sys
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from accelerate_nb.config.environment import USE_CPU
from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.devices.probe import probe
from accelerate_nb.errors import LaunchError, PayloadError
from accelerate_nb.events.model import NodeRanks
from accelerate_nb.launching.engines.children import Engine
from accelerate_nb.launching.group_runner import GroupRunner, RunContext
from accelerate_nb.launching.node_agent.node_network import check_versions, facts_of_this_node
from accelerate_nb.launching.nodes.joined_machines import wait_for_machines
from accelerate_nb.launching.nodes.node_engine import (
    HandedMachine,
    LocalNodes,
    NodeEngine,
    SlurmNodes,
    SshNodes,
    allocated_hosts,
    used_and_others,
)
from accelerate_nb.launching.nodes.node_placement import (
    Host,
    NodeRoster,
    check_min_nodes,
    check_spares,
    hosts_of,
    leave_out,
    place_on_hosts,
    place_on_local_nodes,
    ranks_of_nodes,
    reachable_change,
    read_hostfile,
    spares_with_slots,
    split_spares,
)
from accelerate_nb.launching.nodes.node_pool import lease, open_group, release
from accelerate_nb.launching.nodes.ray import UNRESERVED, reserve_ray_nodes
from accelerate_nb.launching.planning.placement import LaunchPlan, Placement, check_training
from accelerate_nb.launching.worker_group import Stop
from accelerate_nb.transport.messages import NodeFacts
from accelerate_nb.transport.payload import Payload
from accelerate_nb.transport.worker_spec import LOOPBACK, ProcessEnvironment, current_environment

# The variables of this process that workers on other machines get, too: settings of training, and of the libraries below it.
_EXPORTED = (
    "ACCELERATE_",
    "FSDP_",
    "PARALLELISM_",
    "HF_",
    "NCCL_",
    "PYTORCH_",
    "TOKENIZERS_",
    "TORCH_",
    "TRANSFORMERS_",
    "WANDB_",
)


@dataclass(slots=True)
class RunNodes:
    """The nodes of a run: how their agents are placed, their names, and the number of ranks of each; of the next attempt, after a loss."""

    engine: NodeEngine
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    # hosts that take the places of nodes that are lost
    spares: tuple[Host, ...] = ()
    # the fewest nodes with which it goes on after a loss; `None` where all are needed
    min_nodes: int | None = None
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def inherits_environment(self) -> bool:
        """Whether workers have their node's own environment: they are on other machines."""
        return self.engine.inherits_environment

    @property
    def ranks_here(self) -> range | None:
        """The ranks on this machine: all, or none that is known."""
        return range(0) if self.inherits_environment else None

    @property
    def node_ranks(self) -> list[NodeRanks]:
        """The ranks of each node."""
        return ranks_of_nodes(self.names, self.sizes)

    @property
    def retries_at_once(self) -> bool:
        """Whether an attempt that was lost before it began is made once more, on as many nodes."""
        return self.min_nodes is None

    def placement_here(self, placement: Placement) -> Placement:
        """The part of a placement that is on this machine: agents that pretend to be machines share it."""
        return placement

    def variables(self) -> dict[str, str]:
        """The variables that have collectives use the interface between the nodes: agents know it."""
        return {}

    def check_payload(self, payload: Payload) -> None:
        """Raise `PayloadError` where it holds what can't leave this machine."""
        if self.inherits_environment and payload.reference is not None and payload.reference.handles:
            raise PayloadError(
                "A run on other machines was requested, and the function or its arguments hold a pipe, a socket, a queue or "
                "shared memory of multiprocessing, which is of this machine. Make it inside of the function."
            )

    def handed_over(self) -> AbstractContextManager[tuple[HandedMachine, ...]]:
        """The nodes for another process, which inherits their descriptors within the block."""
        return self.engine.handed_over(self.names)

    def worker_group(self, plan: LaunchPlan, _: Engine, run_context: RunContext, number: int) -> GroupRunner:
        """The runner of one attempt; raises `LaunchError` where a node can't be reached, from here or from another node."""
        plan = replace(plan, size=sum(self.sizes), node_sizes=self.sizes)
        log_folder = f"{run_context.record.folder.name}_{plan.run[:6]}_{number}" if self.inherits_environment else ""
        try:
            agents, master = open_group(self.engine, self.names, plan.port, log_folder)
        except LaunchError as error:
            if number == 0:
                raise
            raise LaunchError(
                f"{error}\nThe run was to start again, and no spare host could take its place. List one beyond those that the "
                "processes need, each with its slots: hosts=['a:2', 'b:2', 'c:2'] with num_processes=4, or in an allocation of three nodes "
                "num_nodes=2. Or let the run go on with fewer nodes and processes: num_nodes='1:2'."
            ) from None
        return GroupRunner(plan, agents, run_context, number, master)

    def on_stop_elsewhere(self, request_stop: Callable[[Stop], None]) -> None:
        """No other process stops it."""

    def next_nodes(self, lost: Collection[int], _: Callable[[], bool]) -> str:
        """
        Have others take the places of the nodes of these ranks, or go on without them where there may be fewer.

        Others are those that the engine gives, and then spares. Returns a sentence, which is empty where nothing changes.
        """
        roster = NodeRoster(self.names, self.sizes, self.spares)
        found = {node: self.engine.replacement(roster.names[node]) for node in roster.nodes_of(lost)}
        # where an agent has started on its own machine again, nothing changes
        gone = [node for node, name in found.items() if name != roster.names[node]]
        given = tuple(Host(name, roster.sizes[node]) for node in gone if (name := found[node]) is not None)
        roster = replace(roster, spares=(*given, *roster.spares))
        change = reachable_change(roster, gone, self._can_reach) or leave_out(roster, gone, self.min_nodes)
        if change is None:
            return ""
        self.names, self.sizes, self.spares = change.roster.names, change.roster.sizes, change.roster.spares
        return change.text

    def leave(self, reason: str) -> None:
        """Agents stay for the next launch."""

    def _can_reach(self, name: str) -> bool:
        try:
            (connection,) = lease(self.engine, [name])
            release(connection, is_usable=True)
            check_versions(facts_of_this_node(LOOPBACK), {name: connection.facts})
        except LaunchError:
            return False
        return True


def find_nodes(config: RunConfig) -> tuple[Placement, RunNodes]:
    """
    Place agents on all nodes of a configuration, and choose how many ranks each has.

    Raises `LaunchError` where a node can't be reached, has other versions than this process, or they don't fit the settings.
    """
    launching = config.launching
    _check(launching)
    spares: tuple[Host, ...] = ()
    if not launching.names_hosts:
        hosts: Sequence[Host] = [Host(f"node {index}") for index in range(launching.num_nodes)]
        placement, sizes = place_on_local_nodes(launching, probe(), hosts)
        engine: NodeEngine = LocalNodes()
        facts = _facts(engine, hosts)
    else:
        engine, hosts, spares = _engine_and_hosts(launching)
        facts = _facts(engine, (*hosts, *spares))
        placement, sizes = place_on_hosts(launching, hosts, facts[: len(hosts)], engine.label)
        spares = spares_with_slots(placement, sizes, spares, facts[len(hosts) :])
        check_spares(placement, spares, facts[len(hosts) :])
    names = tuple(host.name for host in (*hosts, *spares))
    check_versions(facts_of_this_node(LOOPBACK), dict(zip(names, facts, strict=True)))
    check_training(config, placement)
    check_min_nodes(config, names[: len(hosts)])
    nodes = RunNodes(engine, names[: len(hosts)], sizes, spares=spares, min_nodes=launching.min_nodes)
    return placement, nodes


def nodes_to_find(config: RunConfig) -> tuple[Placement, RunNodes]:
    """A placement, and the nodes of a Ray cluster that another process is to find: their names and sizes are known then."""
    _check(config.launching)
    return Placement("supervisor", 0, config.launching.cpu, ""), RunNodes(UNRESERVED, (), ())


def _engine_and_hosts(config: LaunchingConfig) -> tuple[NodeEngine, Sequence[Host], tuple[Host, ...]]:
    """The way to the hosts, those that run the processes, and spares."""
    python = config.node_python or sys.executable
    if config.engine == "slurm":
        job, allocated = allocated_hosts(os.environ, config.num_processes)
        used, others = used_and_others(config, allocated)
        return SlurmNodes(job, python), used, others if config.max_restarts else ()
    if config.engine == "join":
        return *wait_for_machines(config), ()
    if config.engine == "ray":
        return *reserve_ray_nodes(config), ()
    hosts = read_hostfile(Path(config.hostfile)) if config.hostfile else hosts_of(config.hosts.split(","))
    hosts, spares = split_spares(config.num_processes, hosts) if config.max_restarts else (hosts, ())
    return SshNodes(tuple(shlex.split(config.ssh_command)), python), hosts, spares


def _check(config: LaunchingConfig) -> None:
    """Raise `LaunchError` for settings that contradict each other."""
    hosts = [f"{name}={value!r}" for name, value in (("hosts", config.hosts), ("hostfile", config.hostfile)) if value]
    if len(hosts) > 1:
        raise LaunchError(f"{' and '.join(hosts)} were both requested. Pass one of them.")
    if hosts and config.engine not in {"auto", "ssh"}:
        raise LaunchError(
            f"{hosts[0]} was requested with engine={config.engine!r}, which runs elsewhere. Leave one of them out."
        )
    if config.engine == "ssh" and not hosts:
        raise LaunchError("engine='ssh' was requested without hosts. Name them: hosts=['a', 'b:4'], or a hostfile.")
    if config.start_method not in {"auto", "supervisor"}:
        raise LaunchError(
            f"start_method={config.start_method!r} was requested on several nodes, whose workers their agents fork. "
            "Leave start_method out."
        )


def _facts(engine: NodeEngine, hosts: Sequence[Host]) -> list[NodeFacts]:
    connections = lease(engine, [host.name for host in hosts])
    facts = [connection.facts for connection in connections]
    for connection in connections:
        release(connection, is_usable=True)
    return facts


def node_environment(config: RunConfig, choice: Placement) -> ProcessEnvironment:
    """The part of this process's state that workers on other machines take over; the rest is their own machine's."""
    threads = config.launching.num_cpu_threads_per_process
    more = {
        **config.environ(),
        **({USE_CPU: "true"} if choice.cpu else {}),
        **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
    }
    found = current_environment(more, threads)
    exported = {name: value for name, value in found.environ.items() if name in more or name.startswith(_EXPORTED)}
    return replace(found, environ=exported)
