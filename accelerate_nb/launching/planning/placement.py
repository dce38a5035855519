"""What places the workers, how many there are, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from accelerate_nb.config.launching import Launching
from accelerate_nb.devices.base import Devices
from accelerate_nb.errors import LaunchError
from accelerate_nb.launching import through_xla
from accelerate_nb.launching.computing import Computing

Start = Literal["inline", "supervisor", "fork", "spawn"]


@dataclass(frozen=True, slots=True)
class Choice:
    """How `size` workers start, whether on the CPU, and the reason in a person's words."""

    start: Start
    size: int
    cpu: bool
    why: str
    # the variables that show workers no other devices than those that were asked for
    shows: Mapping[str, str] = field(default_factory=dict)
    # how many ranks are threads of one process
    per_process: int = 1
    # what ranks compute on, in torch's word: "cpu", "cuda", "xla"
    kind: str = "cpu"


def choose(wish: Launching, devices: Devices, can_fork: bool, mesh: str | None = None) -> Choice:
    """
    The way to start that fits the wish and the machine; `mesh` is the setting `xla_mesh`; pure.

    Raises `LaunchError` where they don't fit together.
    """
    through = through_xla.meant(wish, devices)
    computing = _computing(wish, devices) if through is None else through_xla.computing(wish, through, mesh)
    start, why = _start(wish, computing.size, can_fork)
    if through is not None:
        through_xla.check_start(start, through)
    elif start == "inline" and computing.shows:
        raise LaunchError(
            f"gpu_ids={wish.gpu_ids!r} was asked for with engine='inline', but this process has its devices already. "
            "Leave one of them out."
        )
    return Choice(
        start,
        computing.size,
        computing.kind == "cpu",
        f"{computing.where}; {why}",
        computing.shows,
        computing.per_process,
        computing.kind,
    )


def _computing(wish: Launching, devices: Devices) -> Computing:
    """How many ranks there are on what torch itself computes on."""
    seen = _seen(wish, devices)
    size = wish.num_processes or max(1, 0 if wish.cpu else seen.count)
    if wish.cpu or seen.count == 0:
        return Computing(size, "cpu", f"{size} on the CPU")
    if size > seen.count:
        raise LaunchError(
            f"num_processes={size} was asked for, but {_found(wish, devices, seen)}. "
            f"Ask for at most {seen.count}, or pass cpu=True."
        )
    return Computing(size, devices.kind, f"{size} of {seen.count} {devices.label}s", devices.showing(wish.gpu_ids))


def accelerates_word(choice: Choice, devices: Devices) -> str:
    """What Accelerate's files call such a run."""
    if choice.kind == "xla":
        return "XLA"
    if choice.size == 1:
        return "NO"
    if choice.cpu:
        return "MULTI_CPU"
    return "MULTI_GPU" if devices.kind == "cuda" else f"MULTI_{devices.kind.upper()}"


def _seen(wish: Launching, devices: Devices) -> Devices:
    """The devices that workers see."""
    if missing := () if wish.cpu or not devices.count else devices.missing(wish.gpu_ids):
        raise LaunchError(
            f"gpu_ids={wish.gpu_ids!r} was asked for, but this machine has no {devices.label} {' and no '.join(missing)}: "
            f"they count from 0. Name others, or pass gpu_ids='all'."
        )
    return devices.only(wish.gpu_ids)


def _found(wish: Launching, devices: Devices, seen: Devices) -> str:
    number = f"{seen.count} {devices.label}{'s' if seen.count > 1 else ''}"
    return f"this machine has {number}" if wish.gpu_ids == "all" else f"gpu_ids={wish.gpu_ids!r} shows {number}"


def _start(wish: Launching, size: int, can_fork: bool) -> tuple[Start, str]:
    if wish.engine == "inline":
        return _inline(wish, size)
    if wish.start_method == "auto":
        return (
            ("supervisor", "forked by a supervisor") if can_fork else ("spawn", "fresh Pythons: this system can't fork")
        )
    if wish.start_method != "spawn" and not can_fork:
        raise LaunchError(
            f"start_method={wish.start_method!r} was asked for, but this system can't fork processes. "
            "Leave start_method out, or pass start_method='spawn'."
        )
    return wish.start_method, f"start_method={wish.start_method!r} was asked for"


def _inline(wish: Launching, size: int) -> tuple[Start, str]:
    if size > 1:
        raise LaunchError(
            f"engine='inline' was asked for with num_processes={size}, but this process is only one. "
            "Pass num_processes=1, or leave engine out."
        )
    if wish.timeout is not None:
        raise LaunchError(
            f"timeout={wish.timeout:g} was asked for with engine='inline', where nothing can end the function from outside. "
            "Leave one of them out."
        )
    if wish.num_cpu_threads_per_process is not None:
        raise LaunchError(
            f"num_cpu_threads_per_process={wish.num_cpu_threads_per_process} was asked for with engine='inline', but this "
            "process has its threads already. Leave one of them out."
        )
    return "inline", "in this very process"
