"""The number of ranks on each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accelerate_nb.errors import LaunchError


@dataclass(frozen=True, slots=True)
class Host:
    """A host by its name, and the most ranks that it may have, where that was said."""

    name: str
    slots: int | None = None


def node_sizes(num_processes: int | None, hosts: Sequence[Host], devices: Sequence[int]) -> tuple[int, ...]:
    """
    The number of ranks of each host; `devices` are the accelerators that each has, 0 where it computes on the CPU.

    Hosts with slots are filled in their order; the others share what is left evenly, the first of them having one more. Without
    `num_processes` each host has its slots, else one rank for each accelerator, else one. Raises `LaunchError` where they don't fit.

    >>> node_sizes(8, [Host("a"), Host("b", 4)], [0, 0])
    (4, 4)
    """
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
