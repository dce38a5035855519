"""Settings of a launch: the workers, their devices, their limits and what is shown of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from accelerate_nb.config.environment import USE_CPU
from accelerate_nb.config.settings import setting
from accelerate_nb.config.value_types import DeviceIds, HostList, Label, LabelList, NodeCount
from accelerate_nb.errors import ConfigurationError


def _of_machines(default: Any, **details: Any) -> Any:
    """A setting of launches on several machines."""
    return setting(default, group="machines", advanced=True, **details)


@dataclass(frozen=True, kw_only=True)
class LaunchingConfig:
    """The number of workers, the engine that starts them, and their limits."""

    num_processes: int | None = setting(
        None,
        minimum=1,
        label="Processes",
        help="Number of processes; without it, one for each accelerator.",
        group="many",
    )
    engine: Literal["auto", "inline", "local", "xla", "ssh", "slurm", "join", "ray", "torchrun"] = setting(
        "auto",
        help="Where the workers run: in this process ('inline'), in processes of this machine ('local'), through torch_xla "
        "('xla'), on other machines ('ssh'), on the nodes of SLURM's allocation ('slurm'), on machines that join by a line that is shown "
        "('join'), on nodes of a Ray cluster ('ray'), or on this machine as a node of several, on each of which it is launched ('torchrun').",
        group="where",
        advanced=True,
    )
    start_method: Literal["auto", "supervisor", "fork", "spawn"] = setting(
        "auto",
        help="How a local worker starts: forked by the supervisor, forked by this process, or as a fresh Python.",
        group="where",
        advanced=True,
    )
    cpu: bool = setting(
        False,
        label="Use the CPU only",
        help="Compute on the CPU, also where there are accelerators.",
        variables=[USE_CPU],
        keys=["use_cpu"],
        group="where",
    )
    gpu_ids: Annotated[str, DeviceIds()] = setting(
        "all",
        label="GPUs",
        help="The accelerators of this machine that workers see, by number: 0,2, or all.",
        group="where",
    )
    num_cpu_threads_per_process: int | None = setting(
        None,
        minimum=1,
        label="CPU threads per process",
        help="Number of CPU threads of each worker; without it, its share of the cores.",
        group="many",
        advanced=True,
    )
    enable_cpu_affinity: bool = setting(
        False,
        label="Bind workers to CPU cores",
        help="Bind each worker to the CPU cores near its GPU.",
        variables=["ACCELERATE_CPU_AFFINITY"],
        group="where",
        advanced=True,
    )
    timeout: float | None = setting(
        None, minimum=0, label="Time limit", help="Seconds that the whole run may take.", group="failures"
    )
    results: Literal["main", "all"] = setting(
        "main",
        label="Results of the cell",
        help="The result: rank 0's value ('main'), or a list of every rank's ('all').",
        group="kept",
    )
    detach: bool = setting(
        False,
        help="Let the run outlive the notebook or the terminal that launches it; `attach` finds it again.",
        group="kept",
    )
    max_restarts: int = setting(
        0, minimum=0, help="Number of times that all workers are restarted after a failure.", group="failures"
    )
    restart_delay: float = setting(
        0.1,
        minimum=0,
        help="Seconds before the first restart; the pause doubles with each further one, up to a minute.",
        group="failures",
        advanced=True,
    )
    monitor_interval: float = setting(
        0.1,
        minimum=0,
        help="Without effect, as the end of a worker is noticed at once; Accelerate's launchers take it.",
        group="failures",
        advanced=True,
    )
    supervisor_idle_timeout: float = setting(
        1200.0,
        minimum=0,
        help="After how many seconds without a launch the process that forks workers ends, to free its memory; 0: never.",
        group="where",
        advanced=True,
    )
    use_port: int | None = setting(
        None,
        minimum=0,
        maximum=65535,
        also_as_text=True,
        label="Port",
        help="The port of the rendezvous; without it, or with 0, any free one.",
        keys=["main_process_port"],
        group="where",
        advanced=True,
    )
    master_addr: str = _of_machines(
        "127.0.0.1",
        label="Address of node 0",
        help="The address of node 0, as the other nodes reach it.",
        keys=["main_process_ip"],
    )
    node_rank: int = _of_machines(
        0,
        minimum=0,
        help="The rank of this machine among those on each of which it is launched.",
        keys=["machine_rank"],
    )
    num_nodes: Annotated[int, NodeCount()] = _of_machines(
        1,
        label="Nodes",
        help="Number of machines, on each of which it is launched; with engine='local', of agents on this one that pretend to be "
        "machines; with engine='join', of those that join; with engine='slurm', of those of the allocation that are used.",
        keys=["num_machines"],
    )
    min_nodes: int | None = _of_machines(
        None,
        minimum=1,
        label="Fewest nodes",
        help="With max_restarts: a run that lost nodes goes on with as few as these, and with fewer processes; num_nodes='1:2' sets both.",
    )
    hosts: Annotated[str, HostList()] = _of_machines(
        "", help="The machines to run on, which ssh reaches, with their numbers of processes where you like: a,b:4."
    )
    hostfile: str = _of_machines(
        "",
        label="Host file",
        help="A file of hosts as MPI and DeepSpeed read it, in place of hosts: one a line, such as a slots=4.",
    )
    ssh_command: str = _of_machines(
        "ssh", label="SSH command", help="The command that reaches hosts, with its options."
    )
    node_python: str = _of_machines(
        "",
        label="Python of the hosts",
        help="The Python of the hosts; without it, the one of this process, by its path.",
    )
    join_address: str = _of_machines(
        "127.0.0.1",
        help="The address of this machine at which others join with engine='join', with a port where you like: 10.0.0.1:4000.",
    )
    join_timeout: float = _of_machines(600.0, minimum=0, help="Seconds that a launch waits for machines to join.")
    address: str = _of_machines(
        "",
        label="Address of the Ray cluster",
        help="The address of the Ray cluster with engine='ray': HOST:PORT, or auto; without it, a local Ray is started.",
    )
    placement_strategy: Literal["strict_spread", "pack"] = _of_machines(
        "strict_spread",
        label="Placement on Ray",
        help="With engine='ray', 'strict_spread' has each node on a machine of its own, and 'pack' uses as few machines as possible.",
    )
    rdzv_backend: Literal["static", "c10d"] = _of_machines(
        "static",
        label="Rendezvous backend",
        help="How machines get their ranks: by node_rank ('static'), or in the order in which they come ('c10d').",
        unsupported=("etcd", "etcd-v2"),
    )
    rdzv_endpoint: str = _of_machines(
        "",
        label="Rendezvous endpoint",
        help="The host and the port at which the machines meet; without it, master_addr and use_port.",
    )
    rdzv_conf: Mapping[str, Any] | None = _of_machines(
        None,
        label="Rendezvous options",
        help="More options of the meeting: join_timeout (seconds that machines wait for each other), is_host.",
    )
    rdzv_id: str = _of_machines(
        "none", label="Name of the rendezvous", help="A name for the run, equal on all machines."
    )
    log_line_prefix_template: str | None = setting(
        None,
        label="Prefix of lines",
        help="The prefix of a rank's lines; ${role_name}, ${local_rank} and ${rank} are filled in.",
        group="shown",
        advanced=True,
    )
    name: Annotated[str, Label()] | None = setting(
        None,
        label="Name of the run",
        help="The name of the run; without it, its function, with the arguments in which the function's runs differ.",
        group="kept",
    )
    tags: Annotated[str, LabelList()] = setting("", help="Tags of the run: baseline,bf16.", group="kept")
    folder: str | None = setting(
        None,
        label="Folder of runs",
        help="The parent folder of all runs' folders; without it, one in the user's cache.",
        group="kept",
    )
    panel: Literal["auto", "widget", "html", "text", "off"] = setting(
        "auto",
        help="How the run is shown: a live panel ('widget'), HTML that needs no kernel, lines of text, nothing, or what the "
        "notebook or terminal can show ('auto').",
        group="shown",
    )
    report: Literal["interactive", "static"] | None = setting(
        None,
        label="Report in the notebook",
        help="Without effect, and gone in the next release: a notebook keeps one small report of each run.",
        group="shown",
        advanced=True,
    )
    hang_warning_after: float = setting(
        60.0,
        deprecated=["quiet"],
        minimum=0,
        help="Seconds without output from any rank until a warning shows where the ranks are, and a run that waits for a rank that has "
        "returned ends; 0: never.",
        group="failures",
        advanced=True,
    )
    stop_grace_period: float = setting(
        2.0,
        deprecated=["grace"],
        minimum=0,
        help="Seconds that workers have to exit by themselves after an interrupt.",
        group="failures",
        advanced=True,
    )

    def __post_init__(self) -> None:
        if self.node_rank >= self.num_nodes:
            raise ConfigurationError(
                f"node_rank={self.node_rank} was given for num_nodes={self.num_nodes}. Ranks of nodes begin with 0: pass one below num_nodes."
            )
        if self.num_nodes == 1:
            return
        if self.names_hosts and self.engine not in {"join", "ray", "slurm"} and self.min_nodes is None:
            raise ConfigurationError(
                f"num_nodes={self.num_nodes} was given, and the machines are named by hosts or a hostfile. Leave num_nodes out."
            )
        if self.engine in {"inline", "xla"}:
            raise ConfigurationError(
                f"num_nodes={self.num_nodes} was given with engine={self.engine!r}, which runs on one machine. Leave one of them out."
            )

    def check_min_nodes(self) -> None:
        """Raise `ConfigurationError` where `min_nodes` can have no effect on a launch with these settings."""
        if self.min_nodes is None:
            return
        if self.min_nodes > self.num_nodes > 1:
            raise ConfigurationError(
                f"min_nodes={self.min_nodes} was given for num_nodes={self.num_nodes}. Pass the smaller number first: num_nodes='1:2'."
            )
        if self.is_on_each_node and self.rdzv_backend == "c10d":
            # as torchrun, it begins with those that have come
            return
        if not self.max_restarts:
            raise ConfigurationError(
                f"min_nodes={self.min_nodes} was given without max_restarts: a run that lost a node goes on by a restart. Pass "
                "max_restarts=1 or more, or one number of nodes."
            )
        if self.is_on_each_node or not (self.names_hosts or self.num_nodes > 1):
            raise ConfigurationError(
                f"min_nodes={self.min_nodes} was given, and no other machines are reached from here, of which some could be left out. Name "
                "them by hosts, a hostfile, or engine='slurm'; a run that each machine launches begins with fewer with rdzv_backend='c10d'."
            )

    @property
    def is_on_each_node(self) -> bool:
        """Whether it is launched on each of several machines, of which this is one."""
        return self.num_nodes > 1 and not self.names_hosts and self.engine != "local"

    def of_this_node(self) -> LaunchingConfig:
        """The settings of this machine alone, which has its share of the processes; an error where that can't be even."""
        if not self.is_on_each_node:
            return self
        if (self.num_processes or 0) % self.num_nodes:
            raise ConfigurationError(
                f"num_processes={self.num_processes} was given for num_nodes={self.num_nodes}, which can't share them evenly. Pass a "
                "multiple of num_nodes: it is the number of all processes."
            )
        share = None if self.num_processes is None else self.num_processes // self.num_nodes
        return replace(self, num_processes=share, num_nodes=1, node_rank=0, engine="auto")

    @property
    def names_hosts(self) -> bool:
        """Whether other machines are to be run on."""
        return bool(self.hosts or self.hostfile) or self.engine in {"ssh", "slurm", "join", "ray"}

    @property
    def port(self) -> int:
        """The port to bind; 0 is any free one."""
        return self.use_port or 0

    def environ(self) -> dict[str, str]:
        """The variables through which the `Accelerator` in a worker gets these settings."""
        flags = {USE_CPU: self.cpu, "ACCELERATE_CPU_AFFINITY": self.enable_cpu_affinity}
        return {name: str(yes).lower() for name, yes in flags.items()}
