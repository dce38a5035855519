"""The wish for how workers come to be."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from accelerate_nb.config.fields import setting
from accelerate_nb.config.kinds import Ids
from accelerate_nb.errors import NotYetError


@dataclass(frozen=True, kw_only=True)
class Launching:
    """How many workers there are, what places them, and for how long."""

    num_processes: int | None = setting(
        None,
        minimum=1,
        help="How many processes run the function; without it, one for each accelerator.",
        group="many",
    )
    engine: Literal["auto", "inline", "local", "xla"] = setting(
        "auto",
        help="What places the workers: this very process ('inline'), processes on this machine ('local'), or processes that compute through torch_xla ('xla').",
        later=("ray", "torchrun"),
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
    gpu_ids: Annotated[str, Ids()] = setting(
        "all",
        help="Which of this machine's accelerators workers see, by their numbers: 0,2, or all.",
        group="where",
    )
    num_cpu_threads_per_process: int | None = setting(
        None,
        minimum=1,
        help="With how many threads each worker computes on the CPU; without it, its share of the cores.",
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
    timeout: float | None = setting(None, minimum=0, help="How many seconds the whole run may take.", group="failures")
    results: Literal["main", "all"] = setting(
        "main",
        help="What comes back: rank 0's value ('main'), or a list of every rank's ('all').",
        group="kept",
    )
    max_restarts: int = setting(
        0, minimum=0, help="How often all workers are started again after a failure.", group="failures"
    )
    monitor_interval: float = setting(
        0.1, minimum=0, help="Seconds between two looks at the workers.", group="failures", advanced=True
    )
    use_port: int | None = setting(
        None,
        minimum=0,
        maximum=65535,
        also_as_text=True,
        help="The port at which workers meet; without it, or with 0, any free one.",
        keys=["main_process_port"],
        group="where",
        advanced=True,
    )
    master_addr: str = setting(
        "127.0.0.1",
        help="The address at which workers meet.",
        keys=["main_process_ip"],
        group="machines",
        advanced=True,
    )
    node_rank: int = setting(
        0, minimum=0, help="Which of the machines this one is.", keys=["machine_rank"], group="machines", advanced=True
    )
    num_nodes: int = setting(
        1, minimum=1, help="How many machines there are.", keys=["num_machines"], group="machines", advanced=True
    )
    rdzv_backend: str = setting("static", help="How machines find each other.", group="machines", advanced=True)
    rdzv_endpoint: str = setting("", help="Where machines find each other.", group="machines", advanced=True)
    rdzv_conf: Mapping[str, Any] | None = setting(
        None, help="More for the way in which machines find each other.", group="machines", advanced=True
    )
    rdzv_id: str = setting("none", help="A name for the run, equal on all machines.", group="machines", advanced=True)
    log_line_prefix_template: str | None = setting(
        None,
        help="What stands before a rank's line; ${role_name}, ${local_rank} and ${rank} are filled in.",
        group="shown",
        advanced=True,
    )
    folder: str | None = setting(
        None,
        help="The folder in which each run has its own; without it, one in the user's cache.",
        group="kept",
    )
    panel: Literal["auto", "widget", "html", "text", "off"] = setting(
        "auto",
        help="How the run is shown: a live panel ('widget'), HTML that needs no kernel, lines of text, nothing, or what the "
        "place can show ('auto').",
        group="shown",
    )
    quiet: float = setting(
        60.0,
        minimum=0,
        help="After how many seconds without a word from any rank one is told where they are; 0: never.",
        group="failures",
        advanced=True,
    )
    grace: float = setting(
        2.0,
        minimum=0,
        help="Seconds in which workers may end by themselves after an interrupt.",
        group="failures",
        advanced=True,
    )

    def __post_init__(self) -> None:
        for asked, name in self._on_several_machines():
            raise NotYetError(
                f"{name}={asked!r} asks for a run on several machines, and only one machine is offered here yet. "
                f"Leave {name} out to run on this machine."
            )

    def _on_several_machines(self) -> list[tuple[Any, str]]:
        """The settings that make sense only where there are several machines."""
        return [
            (value, name)
            for name, value, one_machine in (
                ("num_nodes", self.num_nodes, self.num_nodes == 1),
                ("node_rank", self.node_rank, self.node_rank == 0),
                ("master_addr", self.master_addr, _is_loopback(self.master_addr)),
                ("rdzv_backend", self.rdzv_backend, self.rdzv_backend in {"static", "c10d"}),
                ("rdzv_endpoint", self.rdzv_endpoint, _is_loopback(_host(self.rdzv_endpoint))),
            )
            if not one_machine
        ]

    @property
    def port(self) -> int:
        """The port to bind; 0 is any free one."""
        return self.use_port or 0

    def environ(self) -> dict[str, str]:
        """What the `Accelerator` in a worker has to know of this."""
        asked = {"ACCELERATE_USE_CPU": self.cpu, "ACCELERATE_CPU_AFFINITY": self.enable_cpu_affinity}
        return {name: str(yes).lower() for name, yes in asked.items()}


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
