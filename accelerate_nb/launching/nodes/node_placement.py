"""The hosts of a run, by names or from a file: how many ranks run on each, on what they compute, and which take part after a loss."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.options import parallelism
from accelerate_nb.config.rank_lists import of_ranks
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.config.training import TrainingConfig
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.launching.planning.placement import Host, NodeRoster, Placement, choose
from accelerate_nb.transport.messages import NodeFacts


def node_sizes(num_processes: int | None, hosts: Sequence[Host], devices: Sequence[int]) -> tuple[int, ...]:
    """The number of ranks of each host, of which each has so many accelerators (0: the CPU); raises `LaunchError` where they don't fit."""
    # Hosts with slots are filled in their order; the others share what is left evenly, the first of them having one more.
    if num_processes is None:
        return tuple(host.slots or count or 1 for host, count in zip(hosts, devices, strict=True))
    left, sizes = num_processes, {}
    for index, host in enumerate(hosts):
        if host.slots is not None:
            sizes[index] = min(host.slots, left)
            left -= sizes[index]
    others = [index for index, host in enumerate(hosts) if host.slots is None]
    for place, index in enumerate(others):
        sizes[index] = left // len(others) + (place < left % len(others))
    if empty := [host.name for index, host in enumerate(hosts) if not sizes[index]]:
        raise LaunchError(
            f"num_processes={num_processes} was requested on {len(hosts)} hosts, of which {', '.join(empty)} would have no process. "
            "Name fewer hosts, or pass a larger num_processes. With max_restarts, and slots for each host (a:4,b:4), those beyond are spares."
        )
    if left and not others:
        room = num_processes - left
        raise LaunchError(
            f"num_processes={num_processes} was requested, and the hosts have {room} slots together. "
            f"Pass num_processes={room}, or more slots."
        )
    return tuple(sizes[index] for index in range(len(hosts)))


# `slots=4` of Open MPI and DeepSpeed, which also allows spaces, and `host:4` of MPICH and Intel MPI.
_SLOTS = re.compile(r"\bslots\s*=\s*(\d+)")


def hosts_of(entries: Iterable[str]) -> tuple[Host, ...]:
    """The hosts of entries such as `a`, `b:4`, `me@c:2`, `[::1]:4`; a host that is named twice has the slots of both."""
    found: dict[str, Host] = {}
    for entry in map(str.strip, entries):
        host, colon, number = entry.rpartition(":")
        name, slots = entry.strip("[]"), None
        # an address of IPv6 has more colons, and stands in brackets where slots follow it
        if colon and number.isdecimal() and int(number) and (":" not in host or host.endswith("]")):
            name, slots = host.replace("[", "").replace("]", ""), int(number)
        if (before := found.get(name)) is not None:
            slots = (before.slots or 1) + (slots or 1)
        found[name] = Host(name, slots)
    return tuple(found.values())


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file, one a line (`a slots=4`, `b:4`, or the name alone; `#` begins a comment); raises `ConfigurationError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"hostfile={str(path)!r} was requested, and it can't be read: {error}. Name a file of one host a line."
        ) from None
    entries = []
    for line in (line.partition("#")[0] for line in lines):
        if words := line.split():
            slots = _SLOTS.search(line)
            entries.append(words[0] if slots is None else f"{words[0]}:{slots[1]}")
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


def place_on_local_nodes(
    config: LaunchingConfig, devices: AvailableDevices, hosts: Sequence[Host]
) -> tuple[Placement, tuple[int, ...]]:
    """The placement on agents of this machine, which pretend to be nodes; pure. Raises `LaunchError` where it has accelerators."""
    requested = config if config.num_processes is not None else replace(config, num_processes=len(hosts))
    placement = choose(requested, devices, can_fork=True)
    if placement.kind != "cpu":
        raise LaunchError(
            f"num_nodes={len(hosts)} was requested with engine='local', whose nodes are this one machine: their ranks would use "
            "the same accelerators. Pass cpu=True, or name hosts."
        )
    sizes = node_sizes(placement.size, hosts, [0] * len(hosts))
    why = f"{placement.size} on the CPU, by {len(hosts)} agents on this machine that pretend to be machines"
    return replace(placement, why=why), sizes


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
