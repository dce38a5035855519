"""The nodes of a run, found before anything of it starts, and from one attempt to the next: after a loss others take part."""

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
from accelerate_nb.launching.conductor import Nodes
from accelerate_nb.launching.engines.children import Engine
from accelerate_nb.launching.group_runner import GroupRunner, RunContext
from accelerate_nb.launching.node_agent.node_network import check_versions, facts_of_this_node
from accelerate_nb.launching.nodes import node_engine, node_placement
from accelerate_nb.launching.nodes.joined_machines import wait_for_machines
from accelerate_nb.launching.nodes.node_pool import lease, open_group, release
from accelerate_nb.launching.nodes.ray import UNRESERVED, reserve_ray_nodes
from accelerate_nb.launching.planning.placement import Host, LaunchPlan, NodeRoster, Placement, check_training
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


@dataclass
class RunNodes(Nodes):
    """The nodes of a run: how their agents are placed, and which ranks each has; of the next attempt, after a loss."""

    engine: node_engine.NodeEngine
    # its spares take the places of nodes that are lost
    roster: NodeRoster
    # the fewest nodes with which it goes on after a loss; `None` where all are needed
    min_nodes: int | None = None
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def inherits_environment(self) -> bool:
        """Whether they are on other machines."""
        return self.engine.inherits_environment

    @property
    def ranks_here(self) -> range | None:
        """The ranks on this machine: all, or none that is known."""
        return range(0) if self.inherits_environment else None

    @property
    def retries_at_once(self) -> bool:
        """Whether all nodes are needed."""
        return self.min_nodes is None

    def check_payload(self, payload: Payload) -> None:
        """Raise `PayloadError` where it can't be sent."""
        if self.inherits_environment and payload.reference is not None and payload.reference.handles:
            raise PayloadError(
                "A run on other machines was requested, and the function or its arguments hold a pipe, a socket, a queue or "
                "shared memory of multiprocessing, which is of this machine. Make it inside of the function."
            )

    def handed_over(self) -> AbstractContextManager[tuple[node_engine.HandedMachine, ...]]:
        """The nodes for another process, which inherits their descriptors within the block."""
        return self.engine.handed_over(self.roster.names)

    def worker_group(self, plan: LaunchPlan, engine: Engine, run_context: RunContext, number: int) -> GroupRunner:
        """The runner of one attempt; raises `LaunchError` where a node can't be reached, from here or from another node."""
        plan = replace(plan, size=sum(self.roster.sizes), node_sizes=self.roster.sizes)
        log_folder = f"{run_context.record.folder.name}_{plan.run[:6]}_{number}" if self.inherits_environment else ""
        try:
            agents, master = open_group(self.engine, self.roster.names, plan.port, log_folder)
        except LaunchError as error:
            if number == 0:
                raise
            raise LaunchError(
                f"{error}\nThe run was to start again, and no spare host could take its place. List one beyond those that the "
                "processes need, each with its slots: hosts=['a:2', 'b:2', 'c:2'] with num_processes=4, or in an allocation of three nodes "
                "num_nodes=2. Or let the run go on with fewer nodes and processes: num_nodes='1:2'."
            ) from None
        return GroupRunner(plan, agents, run_context, number, master)

    def next_nodes(self, lost: Collection[int], is_stopped: Callable[[], bool]) -> str:
        """Have others, of the engine or spares, take the places of the nodes of these ranks, or leave them out; in a sentence, else empty."""
        roster, given, gone = self.roster, [], []
        for node, name in enumerate(roster.names):
            if set(lost).isdisjoint(roster.ranks_of(node)):
                continue
            if (found := self.engine.replacement(name)) == name:
                # its agent has started on its own machine again
                continue
            gone.append(node)
            if found is not None:
                given.append(Host(found, roster.sizes[node]))
        if not gone:
            return ""

        def can_reach(name: str) -> bool:
            try:
                check_versions(facts_of_this_node(LOOPBACK), {name: _facts(self.engine, [name])[0]})
            except LaunchError:
                return False
            return True

        roster = replace(roster, spares=(*given, *roster.spares))
        change = node_placement.replace_lost(roster, gone, can_reach) or node_placement.leave_out(
            roster, gone, self.min_nodes
        )
        if change is None:
            return ""
        self.roster, text = change
        return text


def find_nodes(config: RunConfig) -> tuple[Placement, RunNodes]:
    """Place agents on all nodes of a configuration, and choose how many ranks each has; raises `LaunchError` where one can't be reached or fit."""
    launching = config.launching
    _check(launching)
    spares: tuple[Host, ...] = ()
    if not launching.names_hosts:
        hosts: Sequence[Host] = [Host(f"node {index}") for index in range(launching.num_nodes)]
        placement, sizes = node_placement.place_on_local_nodes(launching, probe(), hosts)
        engine: node_engine.NodeEngine = node_engine.LocalNodes()
        facts = _facts(engine, [host.name for host in hosts])
    else:
        engine, hosts, spares = _engine_and_hosts(launching)
        facts = _facts(engine, [host.name for host in (*hosts, *spares)])
        placement, sizes = node_placement.place_on_hosts(launching, hosts, facts[: len(hosts)], engine.label)
        spares = node_placement.spares_with_slots(placement, sizes, spares, facts[len(hosts) :])
    names = tuple(host.name for host in (*hosts, *spares))
    check_versions(facts_of_this_node(LOOPBACK), dict(zip(names, facts, strict=True)))
    check_training(config, placement)
    node_placement.check_min_nodes(config, names[: len(hosts)])
    return placement, RunNodes(engine, NodeRoster(names[: len(hosts)], sizes, spares), launching.min_nodes)


def nodes_to_find(config: RunConfig) -> tuple[Placement, RunNodes]:
    """A placement, and the nodes of a Ray cluster that another process is to find: their names and sizes are known then."""
    _check(config.launching)
    return Placement("supervisor", 0, config.launching.cpu, ""), RunNodes(UNRESERVED, NodeRoster())


def _engine_and_hosts(config: LaunchingConfig) -> tuple[node_engine.NodeEngine, Sequence[Host], tuple[Host, ...]]:
    """The way to the hosts, those that run the processes, and spares."""
    python = config.node_python or sys.executable
    if config.engine == "slurm":
        job, allocated = node_engine.allocated_hosts(os.environ, config.num_processes)
        used, others = node_engine.used_and_others(config, allocated)
        return node_engine.SlurmNodes(job, python), used, others if config.max_restarts else ()
    if config.engine == "join":
        return *wait_for_machines(config), ()
    if config.engine == "ray":
        return *reserve_ray_nodes(config), ()
    hosts = (
        node_placement.read_hostfile(Path(config.hostfile))
        if config.hostfile
        else node_placement.hosts_of(config.hosts.split(","))
    )
    hosts, spares = node_placement.split_spares(config.num_processes, hosts) if config.max_restarts else (hosts, ())
    return node_engine.SshNodes(tuple(shlex.split(config.ssh_command)), python), hosts, spares


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


def _facts(engine: node_engine.NodeEngine, names: Sequence[str]) -> list[NodeFacts]:
    connections = lease(engine, names)
    for connection in connections:
        release(connection, is_usable=True)
    return [connection.facts for connection in connections]


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
