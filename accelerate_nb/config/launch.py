"""Settings of a launch: the workers, their devices, their limits and what is shown of them."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from accelerate_nb.config.settings import setting
from accelerate_nb.config.value_types import DeviceIds
from accelerate_nb.errors import NotYetError


@dataclass(frozen=True, kw_only=True)
class LaunchingConfig:
    """The number of workers, the engine that starts them, and their limits."""

    num_processes: int | None = setting(
        None, minimum=1, help="Number of processes; without it, one for each accelerator.", group="many"
    )
    engine: Literal["auto", "inline", "local", "xla"] = setting(
        "auto",
        help="Where the workers run: in this process ('inline'), in processes of this machine ('local'), or through torch_xla ('xla').",
        unsupported=("ray", "torchrun"),
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
        help="Compute on the CPU, also where there are accelerators.",
        variables=["ACCELERATE_USE_CPU"],
        keys=["use_cpu"],
        group="where",
    )
    gpu_ids: Annotated[str, DeviceIds()] = setting(
        "all", help="The accelerators of this machine that workers see, by number: 0,2, or all.", group="where"
    )
    num_cpu_threads_per_process: int | None = setting(
        None,
        minimum=1,
        help="Number of CPU threads of each worker; without it, its share of the cores.",
        group="many",
        advanced=True,
    )
    enable_cpu_affinity: bool = setting(
        False,
        help="Bind each worker to the CPU cores near its GPU.",
        variables=["ACCELERATE_CPU_AFFINITY"],
        group="where",
        advanced=True,
    )
    timeout: float | None = setting(None, minimum=0, help="Seconds that the whole run may take.", group="failures")
    results: Literal["main", "all"] = setting(
        "main", help="The result: rank 0's value ('main'), or a list of every rank's ('all').", group="kept"
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
        0.1, minimum=0, help="Seconds between two checks of the workers.", group="failures", advanced=True
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
        help="The port of the rendezvous; without it, or with 0, any free one.",
        keys=["main_process_port"],
        group="where",
        advanced=True,
    )
    master_addr: str = setting(
        "127.0.0.1", help="The address of the rendezvous.", keys=["main_process_ip"], group="machines", advanced=True
    )
    node_rank: int = setting(
        0,
        minimum=0,
        help="The rank of this machine among the machines.",
        keys=["machine_rank"],
        group="machines",
        advanced=True,
    )
    num_nodes: int = setting(
        1, minimum=1, help="Number of machines.", keys=["num_machines"], group="machines", advanced=True
    )
    rdzv_backend: str = setting(
        "static", help="The backend of the rendezvous between machines.", group="machines", advanced=True
    )
    rdzv_endpoint: str = setting(
        "", help="The endpoint of the rendezvous between machines.", group="machines", advanced=True
    )
    rdzv_conf: Mapping[str, Any] | None = setting(
        None, help="More options of the rendezvous between machines.", group="machines", advanced=True
    )
    rdzv_id: str = setting("none", help="A name for the run, equal on all machines.", group="machines", advanced=True)
    log_line_prefix_template: str | None = setting(
        None,
        help="The prefix of a rank's lines; ${role_name}, ${local_rank} and ${rank} are filled in.",
        group="shown",
        advanced=True,
    )
    folder: str | None = setting(
        None, help="The parent folder of all runs' folders; without it, one in the user's cache.", group="kept"
    )
    panel: Literal["auto", "widget", "html", "text", "off"] = setting(
        "auto",
        help="How the run is shown: a live panel ('widget'), HTML that needs no kernel, lines of text, nothing, or what the "
        "notebook or terminal can show ('auto').",
        group="shown",
    )
    hang_warning_after: float = setting(
        60.0,
        deprecated=["quiet"],
        minimum=0,
        help="Seconds without output from any rank until a warning shows where the ranks are; 0: never.",
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
        for name, value, is_one_machine in (
            ("num_nodes", self.num_nodes, self.num_nodes == 1),
            ("node_rank", self.node_rank, self.node_rank == 0),
            ("master_addr", self.master_addr, _is_loopback(self.master_addr)),
            ("rdzv_backend", self.rdzv_backend, self.rdzv_backend in {"static", "c10d"}),
            ("rdzv_endpoint", self.rdzv_endpoint, _is_loopback(_host(self.rdzv_endpoint))),
        ):
            if not is_one_machine:
                raise NotYetError(
                    f"{name}={value!r} requests a run on several machines, and only one machine is offered here yet. "
                    f"Leave {name} out to run on this machine."
                )

    @property
    def port(self) -> int:
        """The port to bind; 0 is any free one."""
        return self.use_port or 0

    def environ(self) -> dict[str, str]:
        """The variables through which the `Accelerator` in a worker gets these settings."""
        flags = {"ACCELERATE_USE_CPU": self.cpu, "ACCELERATE_CPU_AFFINITY": self.enable_cpu_affinity}
        return {name: str(yes).lower() for name, yes in flags.items()}


def _host(endpoint: str) -> str:
    """The host of `host:port`, of `host`, of `[host]:port` or of nothing."""
    if endpoint.startswith("["):
        return endpoint[1:].partition("]")[0]
    return endpoint.rpartition(":")[0] if endpoint.count(":") == 1 else endpoint


def _is_loopback(address: str) -> bool:
    """Whether an address is this machine; no address is."""
    if address in {"", "localhost"}:
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
