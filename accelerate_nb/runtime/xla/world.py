"""A rank among others whose devices torch_xla connects."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accelerate_nb.errors import LaunchError
from accelerate_nb.runtime.world.world import RankPlace, World, make_default_group, number_in
from accelerate_nb.runtime.xla import device as xla
from accelerate_nb.runtime.xla.deferred_values import deferred_queue


@dataclass(frozen=True, slots=True)
class XlaWorld(World):
    """
    A rank that computes through torch_xla.

    Ranks talk through their hosts, by gloo, which compiles nothing; their tensors move inside the programs of their devices.
    """

    @property
    def exchange_world(self) -> World:
        return replace(self, device=torch.device("cpu"))

    def settle(self) -> None:
        xla.sync()

    def when_computed(self, report: Callable[[Any], None], values: Any) -> None:
        deferred_queue().add(report, values)

    def report_deferred(self) -> None:
        deferred_queue().finish()


def join_devices(
    environment: Mapping[str, str], store: Callable[[], dist.Store], limit: Mapping[str, timedelta]
) -> XlaWorld:
    """
    Wake this rank's device, and connect its host to the others over what `store` gives, unless a process group does already.

    `limit` is `{"timeout": ...}`, or empty for torch's own.
    """
    device = xla.device()
    if (devices := xla.devices_in_process()) > 1:
        raise LaunchError(
            f"torch_xla drives {devices} devices in this process, each by a thread, as on a TPU v2 or v3, but a rank is a process "
            "here. Launch with notebook_launcher or accelerate-nb launch on a TPU v4 or later, or set CPU_NUM_DEVICES=1."
        )
    rank_place = RankPlace.read(environment) if xla.device_type() == "CPU" else RankPlace(*xla.rank_numbers())
    started = number_in(environment, "WORLD_SIZE", 1)
    if started > rank_place.size:
        # ranks whose devices torch_xla doesn't connect would each train by themselves, and say that they are the first
        raise LaunchError(
            f"{started} processes were started (WORLD_SIZE), but torch_xla knows of {rank_place.size} rank(s): what PJRT_DEVICE="
            f"{environment.get('PJRT_DEVICE')} names is not shared among processes. Start one process, or pass cpu=True."
        )
    if rank_place.size > 1 and not dist.is_initialized():
        if xla.is_among_machines(environment):
            # a launch on one machine keeps to its loopback interface, which no other machine reaches
            os.environ["GLOO_SOCKET_IFNAME"] = xla.pod_interface()
        make_default_group(backend="gloo", rank=rank_place.rank, world_size=rank_place.size, store=store(), **limit)
    return XlaWorld(**asdict(rank_place), device=device, backend="xla" if rank_place.size > 1 else None)


def store_of_devices(limit: Mapping[str, timedelta]) -> dist.Store | None:
    """The store of a rendezvous that torch_xla knows the address of; `None` where a launcher's variables name all of the ranks'."""
    if "MASTER_ADDR" not in os.environ:
        return xla.rendezvous_store(limit)
    return xla.pod_rendezvous_store(limit) if xla.is_among_machines(os.environ) else None
