"""How many ranks compute through torch_xla, on which of its devices, and what of a wish does not fit them."""

from __future__ import annotations

from accelerate_nb.config.launching import Launching
from accelerate_nb.devices.base import Devices
from accelerate_nb.devices.xla import Found
from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.computing import Computing


def meant(wish: Launching, devices: Devices) -> Found | None:
    """
    What ranks compute on through torch_xla; `None` where they don't.

    Raises `LaunchError` where it is asked for, and can't be.
    """
    if wish.cpu and wish.engine == "xla":
        raise LaunchError(
            "engine='xla' was asked for with cpu=True, which means PyTorch's own CPU, without torch_xla. Leave one of them "
            "out; torch_xla computes on the CPU where the environment says PJRT_DEVICE=CPU."
        )
    if wish.engine == "xla" and devices.xla is None:
        raise LaunchError(
            "engine='xla' was asked for, but torch_xla is not installed. pip install 'accelerate-nb[tpu]', or leave engine out."
        )
    if wish.cpu or (wish.engine != "xla" and devices.kind != "xla"):
        return None
    found = devices.xla
    if found is not None and found.trouble:
        raise LaunchError(found.trouble)
    return found


def computing(wish: Launching, found: Found, mesh: str | None) -> Computing:
    """
    How many ranks there are on these devices; pure.

    Raises `LaunchError` for what torch_xla does not do there.
    """
    if wish.gpu_ids != "all":
        raise LaunchError(
            f"gpu_ids={wish.gpu_ids!r} was asked for, but {found.label}s are not chosen by number: torch_xla takes all of them, "
            "or one. Leave gpu_ids out; num_processes=1 takes one."
        )
    if mesh is not None:
        return _as_mesh(wish, found, mesh)
    return _on_cpu(wish, found) if found.device == "CPU" else _on_tpu(wish, found)


def check_start(start: str, found: Found) -> None:
    """
    Raise `LaunchError` where workers that start so could not have the devices, because this process has.

    A TPU's chips belong to one process at a time; the CPU does not, but a runtime that was awake does not outlive a fork.
    """
    if not found.held or start == "inline":
        return
    if found.device == "TPU":
        raise LaunchError(
            f"A launch on {found.label}s was asked for, but {found.held}, and no other process can have them. Restart the "
            "kernel, and launch before any cell calls torch_xla.device(), makes an Accelerator or uses the TPU otherwise."
        )
    if start == "fork":
        raise LaunchError(
            f"start_method='fork' was asked for, but {found.held}, and does not work in a process that is forked from there. "
            "Leave start_method out: the workers then come from a process in which it sleeps."
        )


def _as_mesh(wish: Launching, found: Found, mesh: str) -> Computing:
    """One rank, whose process drives every device."""
    if (wish.num_processes or 1) > 1:
        raise LaunchError(
            f"xla_mesh={mesh!r} was asked for with num_processes={wish.num_processes}, but one process drives all devices of a "
            f"mesh. Leave num_processes out: there are {_several(found.count, found)}."
        )
    return Computing(1, "xla", f"one process on {_several(found.count, found)}", {"PJRT_DEVICE": found.device})


def _on_cpu(wish: Launching, found: Found) -> Computing:
    size = wish.num_processes or found.count
    where = _several(size, found) + ("" if found.asked else ", through torch_xla: there is no TPU")
    return Computing(size, "xla", where, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(size)}, size)


def _on_tpu(wish: Launching, found: Found) -> Computing:
    size = wish.num_processes or found.count
    if size > found.count:
        raise LaunchError(
            f"num_processes={size} was asked for, but this machine has {_several(found.count, found)}. "
            f"Ask for {_all_or_one(found)}, or pass cpu=True."
        )
    if size not in {1, found.count}:
        raise LaunchError(
            f"num_processes={size} was asked for, but torch_xla's processes find each other on all of this machine's "
            f"{_several(found.count, found)} only. Ask for {_all_or_one(found)}."
        )
    where = f"{size} of {_several(found.count, found)}"
    return Computing(size, "xla", where, {"PJRT_DEVICE": "TPU"}, found.per_process if size > 1 else 1)


def _all_or_one(found: Found) -> str:
    return f"{found.count}, or for 1" if found.count > 1 else "1"


def _several(number: int, found: Found) -> str:
    return f"{number} {found.label}{'s' if number != 1 else ''}"
