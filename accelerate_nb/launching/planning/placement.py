"""The choice of engine, number of workers and devices with its reason, and the plan of a group of workers that follows."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accelerate_nb.config.launch import LaunchingConfig
from accelerate_nb.config.options import deepspeed, megatron, parallelism
from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.config.training import TrainingConfig
from accelerate_nb.config.value_types import parse_json
from accelerate_nb.devices import async_io, xla
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.devices.xla import XlaDevices
from accelerate_nb.errors import LaunchError, MissingExtraError, NotYetError
from accelerate_nb.events.event_types import NodeRanks
from accelerate_nb.events.run_folder import status_of
from accelerate_nb.events.run_reader import kept_runs
from accelerate_nb.transport.worker_spec import LOOPBACK, NetworkAddress, ProcessEnvironment, RankInfo, WorkerSpec

if TYPE_CHECKING:
    # a command that only asks for a placement loads no pickler
    from accelerate_nb.transport.payload import Payload

Start = Literal["inline", "supervisor", "fork", "spawn"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The way `size` workers start, whether on the CPU, and the reason in a person's words."""

    start: Start
    size: int
    cpu: bool
    why: str
    # the variables that show workers no other devices than those that were requested
    shows: Mapping[str, str] = field(default_factory=dict)
    # what ranks compute on, in torch's word: "cpu", "cuda", "xla"
    kind: str = "cpu"

    @property
    def preloaded(self) -> tuple[str, ...]:
        """Modules that are worth having loaded before workers are forked."""
        return xla.MODULES if self.kind == "xla" else ()

    @property
    def outlives_fork(self) -> bool:
        """Whether what this process has awake works in a fork of it; a runtime of torch_xla would be dead there."""
        return self.kind != "xla" or not xla.is_awake()

    def fitting(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment, with no variables that keep workers from their devices, or would give them others."""
        return xla.for_workers(environment) if self.kind == "xla" else xla.for_others(environment)


def choose_placement(config: RunConfig, devices: AvailableDevices, can_fork: bool) -> Placement:
    """The way to start a whole configuration, on each of several machines with its share of the processes; raises `LaunchError`."""
    launching = config.launching.of_this_node()
    placement = choose(launching, devices, can_fork)
    if config.training.strategy == "fsdp" and placement.kind == "xla":
        raise LaunchError(
            "strategy='fsdp' was requested on XLA devices, which torch's FSDP doesn't know. "
            "Leave strategy out, so that each rank has the whole model, or train on GPUs."
        )
    if not (launching.names_hosts or config.launching.is_on_each_node):
        check_training(config, placement)
    return placement


def check_training(config: RunConfig, placement: Placement) -> None:
    """Raise `LaunchError` where the strategy or the degrees of parallelism don't fit a placement."""
    if config.training.strategy == "deepspeed":
        check_deepspeed(config.training, placement.kind)
    if config.training.strategy == "megatron":
        check_megatron(config.training, placement.kind, placement.size)
    degrees = config.training.parallelism_config or {}
    if config.training.strategy not in {None, "deepspeed"} and (parts := parallelism.sizes(degrees).get("sp")):
        raise LaunchError(
            f"parallelism_config={{sp_size: {parts}}} was requested with strategy={config.training.strategy!r}, but DeepSpeed alone "
            "splits sequences so. Pass strategy='deepspeed', or cp_size for torch's split."
        )
    if (number := parallelism.processes(degrees)) not in {1, placement.size}:
        axes = ", ".join(f"{axis}_size: {degree}" for axis, degree in parallelism.sizes(degrees).items())
        raise LaunchError(
            f"parallelism_config={{{axes}}} was requested, which takes {number} processes, but this would be a run of "
            f"{placement.size}. Pass num_processes={number}, or other degrees."
        )


def choose(config: LaunchingConfig, devices: AvailableDevices, can_fork: bool) -> Placement:
    """The way to start that fits the settings and the machine; pure. Raises `LaunchError` where they don't fit together."""
    through = requested_xla_devices(config, devices)
    placement = _on_devices(config, devices) if through is None else _on_xla(config, through)
    start, why = _start(config, placement.size, can_fork)
    # a TPU's chips belong to one process at a time; the CPU does not, but a runtime that was awake does not outlive a fork
    if through is not None and through.held and start != "inline" and through.device == "TPU":
        raise LaunchError(
            f"A launch on {through.label}s was requested, but {through.held}, and no other process can have them. Restart the "
            "kernel, and launch before any cell calls torch_xla.device(), makes an Accelerator or uses the TPU otherwise."
        )
    if through is not None and through.held and start == "fork":
        raise LaunchError(
            f"start_method='fork' was requested, but {through.held}, and does not work in a process that is forked from there. "
            "Leave start_method out: the workers then come from a process in which it sleeps."
        )
    if through is None and start == "inline" and placement.shows:
        raise LaunchError(
            f"gpu_ids={config.gpu_ids!r} was requested with engine='inline', but this process has its devices already. "
            "Leave one of them out."
        )
    return replace(placement, start=start, why=f"{placement.why}; {why}")


def _on_devices(config: LaunchingConfig, devices: AvailableDevices) -> Placement:
    """The placement on the devices that torch itself computes on, whatever the way to start."""
    if config.names_hosts:
        # which they are is known once their agents are there
        return Placement("supervisor", config.num_processes or 1, True, "on the hosts that are named")
    if not config.cpu and config.gpu_ids != "all":
        if not devices.count:
            raise LaunchError(
                f"gpu_ids={config.gpu_ids!r} was requested, but torch finds no GPU on this machine (`accelerate-nb env` shows "
                "what it finds). Leave gpu_ids out to compute on the CPU."
            )
        if missing := devices.missing(config.gpu_ids):
            raise LaunchError(
                f"gpu_ids={config.gpu_ids!r} was requested, but this machine has {devices.numbered}, and no "
                f"{' and no '.join(missing)}. Name others, or pass gpu_ids='all'."
            )
    seen = devices.only(config.gpu_ids)
    size = config.num_processes or max(1, 0 if config.cpu else seen.count)
    if config.cpu:
        return Placement("supervisor", size, True, f"{size} on the CPU")
    if seen.count == 0:
        processes = "process" if size == 1 else "processes"
        return Placement("supervisor", size, True, f"{size} {processes}: no GPU found, using the CPU")
    if size > seen.count:
        number = f"{seen.count} {devices.label}{'s' if seen.count > 1 else ''}"
        found = (
            f"this machine has {number}" if config.gpu_ids == "all" else f"gpu_ids={config.gpu_ids!r} shows {number}"
        )
        raise LaunchError(
            f"num_processes={size} was requested, but {found}. Use at most {seen.count}, or pass cpu=True."
        )
    why = f"{size} of {seen.count} {devices.label}s"
    return Placement("supervisor", size, False, why, devices.showing(config.gpu_ids), devices.kind)


def accelerates_word(choice: Placement, devices: AvailableDevices) -> str:
    """The name of such a run in Accelerate's files."""
    if choice.kind == "xla":
        return "XLA"
    if choice.size == 1:
        return "NO"
    if choice.cpu:
        return "MULTI_CPU"
    return "MULTI_GPU" if devices.kind == "cuda" else f"MULTI_{devices.kind.upper()}"


def _start(config: LaunchingConfig, size: int, can_fork: bool) -> tuple[Start, str]:
    if config.engine == "inline":
        if size > 1:
            raise LaunchError(
                f"engine='inline' was requested with num_processes={size}, but this process is only one. "
                "Pass num_processes=1, or leave engine out."
            )
        if config.timeout is not None:
            raise LaunchError(
                f"timeout={config.timeout:g} was requested with engine='inline', where nothing can end the function from "
                "outside. Leave one of them out."
            )
        if config.num_cpu_threads_per_process is not None:
            raise LaunchError(
                f"num_cpu_threads_per_process={config.num_cpu_threads_per_process} was requested with engine='inline', but "
                "this process has its threads already. Leave one of them out."
            )
        return "inline", "in this very process"
    if config.start_method == "auto":
        if can_fork:
            return "supervisor", "forked by a supervisor"
        return "spawn", "fresh Pythons: this system can't fork"
    if config.start_method != "spawn" and not can_fork:
        raise LaunchError(
            f"start_method={config.start_method!r} was requested, but this system can't fork processes. "
            "Leave start_method out, or pass start_method='spawn'."
        )
    return config.start_method, f"start_method={config.start_method!r} was requested"


def devices_of(placement: Placement, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the accelerators that a placement takes, `cuda:0` and so on as the machine counts them; none on the CPU."""
    if placement.kind == "cpu":
        return ()
    visible = {**environment, **placement.shows}.get("CUDA_VISIBLE_DEVICES", "") if placement.kind == "cuda" else ""
    numbers = [word.strip() for word in visible.split(",") if word.strip()] or [*map(str, range(placement.size))]
    return tuple(f"{placement.kind}:{number}" for number in numbers[: placement.size])


def taken(devices: Sequence[str], parent: Path) -> Iterator[str]:
    """A sentence for each detached run among those in `parent` that holds some of these devices."""
    if not devices:
        return
    for run in kept_runs(parent):
        if not run.is_detached or run.is_over:
            continue
        status = status_of(run.folder) or {}
        held = status.get("devices") if status.get("host") == socket.gethostname() else None
        if both := [name for name in (held if isinstance(held, list) else ()) if name in devices]:
            since = time.strftime("%H:%M on %Y-%m-%d", time.localtime(run.started))
            yield (
                f"{', '.join(both)} {'is' if len(both) == 1 else 'are'} taken by the detached run {run.name!r} since {since} "
                f"({run.folder}). Choose others with gpu_ids=, or stop it: accelerate_nb.attach({run.folder.name!r}).stop()."
            )


def requested_xla_devices(config: LaunchingConfig, devices: AvailableDevices) -> XlaDevices | None:
    """The devices that ranks compute on through torch_xla, `None` where they don't; raises `LaunchError` where they can't be used."""
    if config.cpu and config.engine == "xla":
        raise LaunchError(
            "engine='xla' was requested with cpu=True, which means PyTorch's own CPU, without torch_xla. Leave one of them "
            "out; torch_xla computes on the CPU with PJRT_DEVICE=CPU in the environment."
        )
    if config.engine == "xla" and devices.xla is None:
        raise LaunchError(
            "engine='xla' was requested, but torch_xla is not installed. pip install 'accelerate-nb[tpu]', or leave engine out."
        )
    if config.cpu or (config.engine != "xla" and devices.kind != "xla"):
        return None
    found = devices.xla
    if found is not None and found.trouble:
        raise LaunchError(found.trouble)
    return found


def _on_xla(config: LaunchingConfig, found: XlaDevices) -> Placement:
    """The placement on these devices; raises `LaunchError` for what torch_xla does not do there."""
    if config.gpu_ids != "all":
        raise LaunchError(
            f"gpu_ids={config.gpu_ids!r} was requested, but {found.label}s are not chosen by number: torch_xla takes all of them, "
            "or one. Leave gpu_ids out; num_processes=1 takes one."
        )
    size = config.num_processes or found.count
    devices = f"{found.count} {found.label}{'s' if found.count != 1 else ''}"
    if found.device == "CPU":
        where = f"{size} {found.label}{'s' if size != 1 else ''}"
        why = where if found.requested else f"{where}, through torch_xla: there is no TPU"
        shows = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
        return Placement("supervisor", size, False, why, shows, "xla")
    possible = f"{found.count} or 1" if found.count > 1 else "1"
    if size > found.count:
        raise LaunchError(
            f"num_processes={size} was requested, but this machine has {devices}. Use {possible}, or pass cpu=True."
        )
    if size not in {1, found.count}:
        raise LaunchError(
            f"num_processes={size} was requested, but torch_xla's processes find each other on all of this machine's "
            f"{devices} only. Use {possible}."
        )
    return Placement("supervisor", size, False, f"{size} of {devices}", {"PJRT_DEVICE": "TPU"}, "xla")


def check_deepspeed(config: TrainingConfig, kind: str) -> None:
    """Raise `LaunchError` for what DeepSpeed can't do, or `MissingExtraError` where it is not installed; `kind` is of the devices."""
    if find_spec("deepspeed") is None:
        raise MissingExtraError(
            "strategy='deepspeed' was requested, and DeepSpeed is not installed: pip install 'accelerate-nb[deepspeed]'"
        )
    if kind == "xla":
        raise LaunchError(
            "strategy='deepspeed' was requested on XLA devices, which DeepSpeed doesn't know. Leave strategy out, or train on GPUs."
        )
    options = config.deepspeed_config or {}
    if said := deepspeed.conflicts(options):
        raise LaunchError(
            f"deepspeed_config has {', '.join(said)} beside deepspeed_config_file, which says it itself. Write it in that file, "
            "and leave it out here."
        )
    path = options.get("deepspeed_config_file")
    if path is not None and not Path(path).expanduser().is_file():
        raise LaunchError(
            f"deepspeed_config_file={path!r} was requested, which is no file at {Path.cwd()}. Pass the path of a ds_config.json."
        )
    _check_disk(options)
    split = {axis for axis in parallelism.sizes(config.parallelism_config or {}) if axis in {"tp", "pp", "cp"}}
    if split:
        raise LaunchError(
            f"strategy='deepspeed' was requested with parallelism_config by {' and '.join(sorted(split))}, along which it does not "
            "spread a training. Leave these degrees out, or take another strategy."
        )


def _check_disk(options: Mapping[str, Any]) -> None:
    """Raise `LaunchError` where weights or states of optimizers are to be on a disk, and can't be."""
    parts = [part for part in ("optimizer", "param") if options.get(f"offload_{part}_device") == "nvme"]
    for part in parts:
        if options.get(f"offload_{part}_nvme_path") in {None, "", "none"}:
            raise LaunchError(
                f"offload_{part}_device='nvme' was requested without its folder. Pass offload_{part}_nvme_path, a folder on a fast disk."
            )
    path = options.get("deepspeed_config_file")
    # a file that can't be read is left to the ranks, whose error has its lines
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        zero = parse_json(Path(path).expanduser().read_text(encoding="utf-8"))["zero_optimization"] if path else {}
        parts += [part for part in ("optimizer", "param") if zero.get(f"offload_{part}", {}).get("device") == "nvme"]
    if parts and (complaint := async_io.missing_library()):
        raise LaunchError(complaint)


def check_megatron(config: TrainingConfig, kind: str, size: int) -> None:
    """Raise `LaunchError` for what Megatron can't do on so many processes and this kind of device, or `NotYetError`, `MissingExtraError`."""
    if find_spec("megatron") is None:
        raise MissingExtraError(
            "strategy='megatron' was requested, and megatron-core is not installed: pip install 'accelerate-nb[megatron]'"
        )
    if kind != "cuda":
        raise LaunchError(
            f"strategy='megatron' was requested on {kind} devices, but megatron-core computes on the current CUDA device. Launch it on "
            "NVIDIA GPUs, or pass parallelism_config with tp_size or pp_size in its place."
        )
    options = config.megatron_lm_config or {}
    if said := megatron.not_offered(options):
        raise NotYetError(f"megatron_lm_config has {', '.join(said)}, which is not offered here yet. Leave it out.")
    if size % (number := megatron.processes(options)):
        raise LaunchError(
            f"megatron_lm_config was requested with degrees whose product is {number}, which does not divide {size} processes. Pass "
            f"num_processes={number} or a multiple, or other degrees."
        )


@dataclass(frozen=True, slots=True)
class Host:
    """A host by its name, and the most ranks that it may have, where that was said."""

    name: str
    slots: int | None = None


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


@dataclass(frozen=True, slots=True)
class NodeRoster:
    """The names of a run's nodes, in order, the number of ranks of each, and the hosts that are there in case one is lost."""

    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    spares: tuple[Host, ...] = ()

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        first = sum(self.sizes[:node])
        return range(first, first + self.sizes[node])

    @property
    def node_ranks(self) -> list[NodeRanks]:
        """The ranks of each node, in order."""
        ranks = [self.ranks_of(node) for node in range(len(self.names))]
        return [NodeRanks(node, self.names[node], found[0], found[-1]) for node, found in enumerate(ranks)]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A group of `size` workers that run one payload; `port` is 0 where any free one will do."""

    payload: Payload
    size: int
    process_environment: ProcessEnvironment
    run: str
    port: int = 0
    max_restarts: int = 0
    # what ranks compute on, in torch's word
    kind: str = "cpu"
    # how many ranks are on each node, where there are several
    node_sizes: tuple[int, ...] = ()
    # whether the results of other ranks than the first of each node are received, too
    wants_all_results: bool = True

    def with_variables(self, variables: Mapping[str, str]) -> LaunchPlan:
        """The same plan, with more variables in the environment of its workers."""
        environ = {**self.process_environment.environ, **variables}
        return replace(self, process_environment=replace(self.process_environment, environ=environ))

    def specs(self, master: NetworkAddress, restart_count: int) -> list[tuple[WorkerSpec, ...]]:
        """For each node the specs of its workers, in the order of their ranks; `master` is the store of their rendezvous."""
        sizes = self.node_sizes or (self.size,)
        firsts = [sum(sizes[:node]) for node in range(len(sizes))]
        return [
            tuple(
                WorkerSpec(
                    rank_info=RankInfo(
                        rank=rank,
                        size=self.size,
                        local_rank=rank - first,
                        local_size=size,
                        master=master,
                        run=self.run,
                        node_rank=node,
                        nodes=len(sizes),
                        restart_count=restart_count,
                        max_restarts=self.max_restarts,
                    ),
                    process_environment=self.process_environment,
                    kind=self.kind,
                    is_result_wanted=self.wants_all_results or rank in (0, first),
                )
                for rank in range(first, first + size)
            )
            for node, (first, size) in enumerate(zip(firsts, sizes, strict=True))
        ]


def host_store(sock: socket.socket) -> Any:
    """The store of a rendezvous in this process, on its listening socket, which it closes when it ends."""
    from torch.distributed import TCPStore

    host, port = sock.getsockname()
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=sock.detach())


def rendezvous_socket(port: int) -> socket.socket:
    """A socket that listens on loopback before any worker starts, so that no port can be lost to somebody else."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((LOOPBACK, port))
        sock.listen(4096)
    except OSError as error:
        sock.close()
        raise LaunchError(
            f"use_port={port} was requested, but that port can't be had on this machine: {error.strerror}. "
            "Leave use_port out: any free port is found."
        ) from None
    return sock
