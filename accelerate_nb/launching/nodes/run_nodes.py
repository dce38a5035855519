"""The nodes of a run, found before anything of it starts, and from one attempt to the next: after a loss others take part."""

import os
import re
import shlex
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from accelerate_nb.config.environment import USE_CPU
from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.options import parallelism
from accelerate_nb.config.rank_lists import of_ranks
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.config.training import TrainingConfig
from accelerate_nb.devices.probe import probe
from accelerate_nb.errors import ConfigurationError, LaunchError, PayloadError
from accelerate_nb.launching.conductor import Nodes
from accelerate_nb.launching.engines.children import Engine
from accelerate_nb.launching.group_runner import GroupRunner, RunContext
from accelerate_nb.launching.node_agent.node_network import check_versions, facts_of_this_node
from accelerate_nb.launching.nodes import node_pool
from accelerate_nb.launching.nodes.joined_machines import wait_for_machines
from accelerate_nb.launching.nodes.ray import UNRESERVED, reserve_ray_nodes
from accelerate_nb.launching.planning.placement import (
    Host,
    LaunchPlan,
    NodeRoster,
    Placement,
    check_training,
    choose,
    node_sizes,
)
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

# `slots=4` of Open MPI and DeepSpeed, which also allows spaces, and `host:4` of MPICH and Intel MPI.
_SLOTS = re.compile(r"\bslots\s*=\s*(\d+)")


@dataclass
class RunNodes(Nodes):
    """The nodes of a run: how their agents are placed, and which ranks each has; of the next attempt, after a loss."""

    engine: node_pool.NodeEngine
    # its spares take the places of nodes that are lost
    roster: NodeRoster
    # the fewest nodes with which it goes on after a loss; `None` where all are needed
    min_nodes: int | None = None
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def inherits_environment(self) -> bool:
        return self.engine.inherits_environment

    @property
    def ranks_here(self) -> range | None:
        """The ranks on this machine: all, or none that is known."""
        return range(0) if self.inherits_environment else None

    @property
    def retries_at_once(self) -> bool:
        return self.min_nodes is None

    def check_payload(self, payload: Payload) -> None:
        if self.inherits_environment and len(payload.descriptors) > 1:
            raise PayloadError(
                "A run on other machines was requested, and the function or its arguments hold a pipe, a socket, a queue or "
                "shared memory of multiprocessing, which is of this machine. Make it inside of the function."
            )

    def handed_over(self) -> AbstractContextManager[tuple[node_pool.HandedMachine, ...]]:
        return self.engine.handed_over(self.roster.names)

    def worker_group(self, plan: LaunchPlan, engine: Engine, run_context: RunContext, number: int) -> GroupRunner:
        plan = replace(plan, size=sum(self.roster.sizes), node_sizes=self.roster.sizes)
        log_folder = f"{run_context.record.folder.name}_{plan.run[:6]}_{number}" if self.inherits_environment else ""
        try:
            agents, master = node_pool.open_group(self.engine, self.roster.names, plan.port, log_folder)
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
        change = replace_lost(roster, gone, can_reach) or leave_out(roster, gone, self.min_nodes)
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
        requested = launching if launching.num_processes is not None else replace(launching, num_processes=len(hosts))
        placement = choose(requested, probe(), can_fork=True)
        if placement.kind != "cpu":
            raise LaunchError(
                f"num_nodes={len(hosts)} was requested with engine='local', whose nodes are this one machine: their ranks would use "
                "the same accelerators. Pass cpu=True, or name hosts."
            )
        sizes = node_sizes(placement.size, hosts, [0] * len(hosts))
        why = f"{placement.size} on the CPU, by {len(hosts)} agents on this machine that pretend to be machines"
        placement = replace(placement, why=why)
        engine: node_pool.NodeEngine = node_pool.LocalNodes()
        facts = _facts(engine, [host.name for host in hosts])
    else:
        engine, hosts, spares = _engine_and_hosts(launching)
        facts = _facts(engine, [host.name for host in (*hosts, *spares)])
        placement, sizes = place_on_hosts(launching, hosts, facts[: len(hosts)], engine.label)
        spares = spares_with_slots(placement, sizes, spares, facts[len(hosts) :])
    names = tuple(host.name for host in (*hosts, *spares))
    check_versions(facts_of_this_node(LOOPBACK), dict(zip(names, facts, strict=True)))
    check_training(config, placement)
    check_min_nodes(config, names[: len(hosts)])
    return placement, RunNodes(engine, NodeRoster(names[: len(hosts)], sizes, spares), launching.min_nodes)


def nodes_to_find(config: RunConfig) -> tuple[Placement, RunNodes]:
    """A placement, and the nodes of a Ray cluster that another process is to find: their names and sizes are known then."""
    _check(config.launching)
    return Placement("supervisor", 0, config.launching.cpu, ""), RunNodes(UNRESERVED, NodeRoster())


def _engine_and_hosts(config: LaunchingConfig) -> tuple[node_pool.NodeEngine, Sequence[Host], tuple[Host, ...]]:
    """The way to the hosts, those that run the processes, and spares."""
    python = config.node_python or sys.executable
    if config.engine == "slurm":
        job, allocated = node_pool.allocated_hosts(os.environ, config.num_processes)
        used, others = node_pool.used_and_others(config, allocated)
        return node_pool.SlurmNodes(job, python), used, others if config.max_restarts else ()
    if config.engine == "join":
        return *wait_for_machines(config), ()
    if config.engine == "ray":
        return *reserve_ray_nodes(config), ()
    hosts = read_hostfile(Path(config.hostfile)) if config.hostfile else hosts_of(config.hosts.split(","))
    hosts, spares = split_spares(config.num_processes, hosts) if config.max_restarts else (hosts, ())
    try:
        command = tuple(shlex.split(config.ssh_command))
    except ValueError:
        # a quotation mark is open
        command = ()
    if not command:
        raise LaunchError(
            f"ssh_command={config.ssh_command!r} was given, which is no command. Pass its words: ssh_command='ssh -J gate'."
        )
    return node_pool.SshNodes(command, python), hosts, spares


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


def _facts(engine: node_pool.NodeEngine, names: Sequence[str]) -> list[NodeFacts]:
    connections = node_pool.lease(engine, names)
    for connection in connections:
        node_pool.release(connection, is_usable=True)
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


def hosts_of(entries: Iterable[str]) -> tuple[Host, ...]:
    """The hosts of entries such as `a`, `b:4`, `me@c:2`, `[::1]:4`; a host that is named twice has the slots of both."""
    found: dict[str, Host] = {}
    for entry in map(str.strip, entries):
        host, colon, number = entry.rpartition(":")
        name, slots = entry.strip("[]"), None
        # an address of IPv6 has more colons, and stands in brackets where slots follow it
        if colon and number.isdecimal() and int(number) and (":" not in host or host.endswith("]")):
            name, slots = host.replace("[", "").replace("]", ""), int(number)
        if name.startswith("-"):
            # it would be an option of the command that reaches it
            raise ConfigurationError(f"{name!r} was given as a host, and begins with a hyphen. Name hosts alone: a:4.")
        if (before := found.get(name)) is not None:
            slots = (before.slots or 1) + (slots or 1)
        found[name] = Host(name, slots)
    return tuple(found.values())


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file, one a line (`a slots=4`, `b:4`, or the name alone; `#` begins a comment); raises `ConfigurationError`."""
    try:
        # an editor may have put a mark of the encoding before the first line
        lines = path.expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"hostfile={str(path)!r} was requested, and it can't be read: {error}. Name a file of one host a line."
        ) from None
    entries = []
    for line in (line.partition("#")[0] for line in lines):
        if words := line.split():
            slots = _SLOTS.search(line)
            entries.append(words[0] if slots is None else f"[{words[0]}]:{slots[1]}")
    if not entries:
        raise ConfigurationError(
            f"hostfile={str(path)!r} was requested, and it names no host. Write one a line: a slots=4."
        )
    return hosts_of(entries)


def place_on_hosts(
    config: LaunchingConfig, hosts: Sequence[Host], nodes: Sequence[NodeFacts], way: str
) -> tuple[Placement, tuple[int, ...]]:
    """The placement on hosts, and the number of ranks of each; pure. Raises `LaunchError` where they don't fit together."""
    names = ", ".join(host.name for host in hosts)
    kinds = {facts.device_kind for facts in nodes}
    is_on_cpu = config.cpu or kinds == {"cpu"}
    if not is_on_cpu and (len(kinds) > 1 or "xla" in kinds):
        found = ", ".join(f"{host.name} has {facts.device_kind}" for host, facts in zip(hosts, nodes, strict=True))
        raise LaunchError(
            f"A run on {names} was requested, and {found}: ranks of one run compute on devices of one kind of torch's own. "
            "Name other hosts, or pass cpu=True."
        )
    if config.gpu_ids != "all":
        raise LaunchError(
            f"gpu_ids={config.gpu_ids!r} was requested on hosts, whose accelerators are chosen by their own variables, such as "
            "CUDA_VISIBLE_DEVICES. Leave gpu_ids out."
        )
    devices = [0 if is_on_cpu else facts.devices for facts in nodes]
    sizes = node_sizes(config.num_processes, hosts, devices)
    for host, facts, size in zip(hosts, nodes, sizes, strict=True):
        if not is_on_cpu and size > facts.devices:
            raise LaunchError(
                f"{size} processes were requested on {host.name}, which has {facts.devices} {facts.device_label}s. "
                f"Request at most {facts.devices} there ({host.name}:{facts.devices}), or pass cpu=True."
            )
    where = "the CPU" if is_on_cpu else f"{nodes[0].device_label}s"
    spread = ", ".join(f"{size} on {host.name}" for host, size in zip(hosts, sizes, strict=True))
    why = f"{sum(sizes)} on {where}: {spread}; forked by agents, which {way} reaches"
    return Placement("supervisor", sum(sizes), is_on_cpu, why, kind="cpu" if is_on_cpu else nodes[0].device_kind), sizes


def spares_with_slots(
    placement: Placement, sizes: Sequence[int], spares: Sequence[Host], nodes: Sequence[NodeFacts]
) -> tuple[Host, ...]:
    """Spares with their slots, else one for each accelerator, on the CPU as many as any node has ranks; pure. Raises `LaunchError`."""
    found = tuple(
        host if host.slots is not None else Host(host.name, max(sizes) if placement.cpu else facts.devices)
        for host, facts in zip(spares, nodes, strict=True)
    )
    for host, facts in zip(found, nodes, strict=True):
        if not placement.cpu and (facts.device_kind != placement.kind or facts.devices < (host.slots or 0)):
            raise LaunchError(
                f"{host.name}:{host.slots} is a spare for hosts that compute on {placement.kind}, and it has {facts.devices} "
                f"{facts.device_label}s ({facts.device_kind}). Name a host with at least {host.slots}, or leave it out."
            )
    return found


def check_min_nodes(config: RunConfig, names: Sequence[str]) -> None:
    """Raise `LaunchError` where a run can't go on with fewer of its nodes, as `min_nodes` requests; pure."""
    launching = config.launching
    if (least := launching.min_nodes) is None:
        return
    if least > len(names) or launching.num_nodes not in {1, len(names)}:
        most = "" if launching.num_nodes == 1 else f"num_nodes={launching.num_nodes} with "
        raise LaunchError(
            f"{most}min_nodes={least} was requested, and the processes are on {len(names)} nodes ({', '.join(names)}). Pass "
            f"num_nodes='1:{len(names)}', or name other hosts."
        )
    if found := fixed_mesh(config.training):
        raise LaunchError(
            f"min_nodes={least} was requested with {found}, whose mesh has a fixed number of processes: it can't go on with fewer. Leave "
            "min_nodes out, and list a spare host beyond those that the processes need."
        )


def fixed_mesh(training: TrainingConfig) -> str:
    """The setting that has a mesh of a fixed number of processes, which can't become fewer or more; empty where none has."""
    degrees = parallelism.sizes(training.parallelism_config or {})
    if training.strategy == "megatron":
        return "strategy='megatron'"
    axes = ", ".join(f"{axis}_size: {degree}" for axis, degree in degrees.items())
    return f"parallelism_config={{{axes}}}" if parallelism.processes(degrees) > 1 else ""


def split_spares(num_processes: int | None, hosts: Sequence[Host]) -> tuple[tuple[Host, ...], tuple[Host, ...]]:
    """The hosts that so many processes need, filled in their order, and those beyond, which are spares; all of them have slots."""
    if num_processes is None or any(host.slots is None for host in hosts):
        return tuple(hosts), ()
    room = 0
    for count, host in enumerate(hosts, 1):
        room += host.slots or 0
        if room >= num_processes:
            return tuple(hosts[:count]), tuple(hosts[count:])
    return tuple(hosts), ()


def replace_lost(
    roster: NodeRoster, lost: Collection[int], can_reach: Callable[[str], bool]
) -> tuple[NodeRoster, str] | None:
    """The nodes with a reachable spare in the place of each lost one, and a sentence; `None` without enough spares that have room."""
    names, spares, texts = list(roster.names), list(roster.spares), []
    for node in sorted(lost):
        for spare in [host for host in spares if (host.slots or 0) >= roster.sizes[node]]:
            spares.remove(spare)
            if can_reach(spare.name):
                break
        else:
            return None
        names[node] = spare.name
        ranks = of_ranks(roster.ranks_of(node))
        verb = "starts" if roster.sizes[node] == 1 else "start"
        texts.append(f"{_called(roster.names[node])} was lost; {ranks} {verb} again on {spare.name}")
    # a lost host is the last of the spares from then on: it may come back
    returning = [Host(roster.names[node], roster.sizes[node]) for node in sorted(lost)]
    return NodeRoster(tuple(names), roster.sizes, (*spares, *returning)), "; ".join(texts)


def leave_out(roster: NodeRoster, lost: Collection[int], min_nodes: int | None) -> tuple[NodeRoster, str] | None:
    """The nodes without those that were lost, with fewer ranks, and a sentence; `None` where fewer than `min_nodes` would be left; pure."""
    left = [node for node in range(len(roster.names)) if node not in lost]
    if min_nodes is None or len(left) < max(min_nodes, 1) or not lost:
        return None
    names, sizes = tuple(roster.names[node] for node in left), tuple(roster.sizes[node] for node in left)
    gone = [_called(roster.names[node]) for node in sorted(lost)]
    subject = f"{' and '.join(gone)} {'was' if len(gone) == 1 else 'were'}"
    verb = "starts" if sum(sizes) == 1 else "start"
    text = f"{subject} lost; {sum(sizes)} of {sum(roster.sizes)} ranks {verb} again, on {', '.join(names)}"
    return NodeRoster(names, sizes, roster.spares), text


def _called(name: str) -> str:
    """A node in a sentence: hosts have names of their own, others are numbered."""
    return name if name.startswith("node ") else f"node {name}"
