"""What places the workers, how many there are, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accelerate_nb.config.launching import Launching
from accelerate_nb.devices.base import Devices
from accelerate_nb.errors import LaunchError

Start = Literal["inline", "supervisor", "fork", "spawn"]


@dataclass(frozen=True, slots=True)
class Choice:
    """How `size` workers start, whether on the CPU, and the reason in a person's words."""

    start: Start
    size: int
    cpu: bool
    why: str


def choose(wish: Launching, devices: Devices, can_fork: bool) -> Choice:
    """
    The way to start that fits the wish and the machine; pure.

    Raises `LaunchError` where they don't fit together.
    """
    size = wish.num_processes or max(1, 0 if wish.cpu else devices.count)
    on_cpu = wish.cpu or devices.count == 0
    if not on_cpu and size > devices.count:
        raise LaunchError(
            f"num_processes={size} was asked for, but this machine has {devices.count} {devices.label}"
            f"{'s' if devices.count > 1 else ''}. Ask for at most {devices.count}, or pass cpu=True."
        )
    where = f"{size} on the CPU" if on_cpu else f"{size} of {devices.count} {devices.label}s"
    start, why = _start(wish, size, can_fork)
    return Choice(start, size, on_cpu, f"{where}; {why}")


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
    return "inline", "in this very process"
