"""A process's preparation before its ranks compute through torch_xla."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate_nb.devices import xla
from accelerate_nb.errors import LaunchError
from accelerate_nb.rank.lockstep import Lockstep
from accelerate_nb.transport.rank_info import RankInfo


def wake(rank_info: RankInfo) -> None:
    """Have torch_xla's runtime begin in the process of a rank, which may have more ranks as threads."""
    xla.read_environment_again()
    xla.wake(rank_info.process, rank_info.processes)


def devices_for(ranks: int) -> Sequence[str]:
    """The devices of this process, one for each of its ranks, in the order of ranks; the runtime is awake."""
    import torch_xla
    import torch_xla.core.xla_model as model

    # a process's devices need not come in the order of their numbers among all
    found = sorted(model.get_xla_supported_devices(), key=torch_xla._XLAC._xla_get_device_ordinal)
    if len(found) != ranks:
        raise LaunchError(
            f"{ranks} ranks were to share a process, a device for each, but torch_xla has {len(found)} in it. "
            "Leave num_processes out to use all devices."
        )
    return found


def steps_together(ranks: int) -> Lockstep | None:
    """
    The lockstep of this process's ranks; `None` where each may go its way, as on TPUs.

    On the CPU, XLA ends the process where one device waits 10 s for another one's part of a collective ("Termination timeout
    for all reduce RendezvousKey"), as it does when two threads compile at once.
    """
    from torch_xla import runtime

    return Lockstep(ranks) if runtime.device_type() == "CPU" else None


def read_first_value(device: str) -> None:
    """
    Read a value from a device, before threads do so.

    The first read makes a counter, without a lock: of threads that read their first values at once, one ends the process with
    SIGSEGV (`_fallback_counters` of torch_xla/csrc/aten_fallback.cpp).
    """
    import torch

    torch.zeros((), device=device).item()


def compute_on(device: str) -> None:
    """Make this the thread's device, as `torch_xla.launch` does (`_run_thread_per_device` of `torch_xla/_internal/pjrt.py`)."""
    import torch_xla
    from torch_xla import runtime

    torch_xla._XLAC._xla_set_default_device(device)
    runtime._init_world_size_ordinal()
