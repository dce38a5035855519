"""The accelerators that detached runs hold on this machine, so that another launch does not take them unawares."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from accelerate_nb.events.run_folder import status_of
from accelerate_nb.events.run_reader import SavedRun, kept_runs
from accelerate_nb.launching.planning.placement import Placement


def devices_of(placement: Placement, environment: Mapping[str, str]) -> tuple[str, ...]:
    """
    The names of the accelerators that a placement takes, `cuda:0` and so on as the machine counts them; none on the CPU.

    >>> devices_of(Placement("supervisor", 2, False, "", {"CUDA_VISIBLE_DEVICES": "4,5"}, kind="cuda"), {})
    ('cuda:4', 'cuda:5')
    """
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
        if run.is_detached and not run.is_over and (both := [name for name in _held_by(run) if name in devices]):
            since = time.strftime("%H:%M on %Y-%m-%d", time.localtime(run.started))
            yield (
                f"{', '.join(both)} {'is' if len(both) == 1 else 'are'} taken by the detached run {run.name!r} since {since} "
                f"({run.folder}). Choose others with gpu_ids=, or stop it: accelerate_nb.attach({run.folder.name!r}).stop()."
            )


def _held_by(run: SavedRun) -> list[str]:
    status = status_of(run.folder) or {}
    devices = status.get("devices")
    return [*map(str, devices)] if status.get("host") == socket.gethostname() and isinstance(devices, list) else []
