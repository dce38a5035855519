"""A rank among others whose devices torch_xla connects, and its queue of prints and logs that a device has still to compute."""

import os
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.errors import LaunchError
from accelerate_nb.rank import background_tasks
from accelerate_nb.runtime.operations.nested import leaves_of, mapped
from accelerate_nb.runtime.world.world import World, make_default_group, number_in, rank_numbers
from accelerate_nb.runtime.xla import device as xla
from accelerate_nb.user_warnings import warn_user


@dataclass(slots=True)
class _DeferredValue:
    """Values with the callback that reports them."""

    callback: Callable[[Any], None]
    values: Any
    is_computing: bool = False


class DeferredQueue:
    """A rank's prints and logs whose values a device has still to compute: in order, without making it wait."""

    # Values that are printed in one step are computed with it, and are read when the next step is going to be given to the device:
    # torch_xla waits for the former one there anyway, so that nothing is waited for twice, and nothing is compiled for them.

    def __init__(self) -> None:
        self._waiting: deque[_DeferredValue] = deque()

    def add(self, callback: Callable[[Any], None], values: Any) -> None:
        """Report values: at once where they are there and nothing waits, else when they are."""
        if not self._waiting and not _on_device(values):
            callback(values)
            return
        if not self._waiting:
            xla.before_sync(self.turn)
            background_tasks.register(self.finish, self.salvage)
        context = copy_context()
        self._waiting.append(
            _DeferredValue(lambda item: context.run(callback, item), mapped(_as_it_is, values, records=True))
        )

    def turn(self) -> None:
        """The device is going to be given its pending work."""
        while self._waiting and self._waiting[0].is_computing:
            self._report_next()
        for item in self._waiting:
            item.is_computing = True

    def finish(self) -> None:
        """Report everything that is left."""
        left = [tensor for item in self._waiting if not item.is_computing for tensor in _on_device(item.values)]
        if left and not xla.are_computed(left):
            xla.sync()
        while self._waiting:
            self._report_next()

    def salvage(self) -> None:
        """Report what is left and can be known without the other ranks, after the function has failed."""
        # what the device was not yet given may hold what comes from others, who are at another point of their programs
        if not xla.are_connected():
            self.finish()
            return
        lost = 0
        while self._waiting:
            if self._waiting[0].is_computing or not _on_device(self._waiting[0].values):
                self._report_next()
            else:
                self._waiting.popleft()
                lost += 1
        if lost:
            warn_user(f"Values of {lost} prints and logs had not been computed yet when the function failed.")

    def _report_next(self) -> None:
        value = self._waiting.popleft()
        if not self._waiting:
            background_tasks.forget(self.finish)
        value.callback(
            mapped(lambda item: item.cpu() if isinstance(item, Tensor) else item, value.values, records=True)
        )


_queue = DeferredQueue()


def _on_device(values: Any) -> list[Tensor]:
    return [item for item in leaves_of(values, records=True) if isinstance(item, Tensor) and item.device.type == "xla"]


def _as_it_is(value: Any) -> Any:
    """The value of now, also of a tensor that is changed in place before it is read; no computation of its own is made of it."""
    if isinstance(value, Tensor) and value.device.type == "xla":
        value = value.detach()
        return torch._from_functional_tensor(value) if torch._is_functional_tensor(value) else value
    return value


@dataclass(frozen=True, slots=True)
class XlaWorld(World):
    """A rank that computes through torch_xla: ranks talk through their hosts, by gloo, and their tensors move inside programs."""

    @property
    def exchange_world(self) -> World:
        return replace(self, device=torch.device("cpu"))

    def settle(self) -> None:
        xla.sync()

    def when_computed(self, report: Callable[[Any], None], values: Any) -> None:
        _queue.add(report, values)

    def report_deferred(self) -> None:
        _queue.finish()


def join_devices(
    environment: Mapping[str, str], store: Callable[[], dist.Store], limit: Mapping[str, timedelta]
) -> XlaWorld:
    """Wake this rank's device, and connect its host to the others; `limit` is `{"timeout": ...}`, or empty for torch's own."""
    device = xla.device()
    if (devices := xla.devices_in_process()) > 1:
        raise LaunchError(
            f"torch_xla drives {devices} devices in this process, each by a thread, as on a TPU v2 or v3, but a rank is a process "
            "here. Launch with notebook_launcher or accelerate-nb launch on a TPU v4 or later, or set CPU_NUM_DEVICES=1."
        )
    numbers = rank_numbers(environment) if xla.device_type() == "CPU" else xla.rank_numbers()
    rank, size, *_ = numbers
    started = number_in(environment, "WORLD_SIZE", 1)
    if started > size:
        # ranks whose devices torch_xla doesn't connect would each train by themselves, and say that they are the first
        raise LaunchError(
            f"{started} processes were started (WORLD_SIZE), but torch_xla knows of {size} rank(s): what PJRT_DEVICE="
            f"{environment.get('PJRT_DEVICE')} names is not shared among processes. Start one process, or pass cpu=True."
        )
    if size > 1 and not dist.is_initialized():
        if xla.is_among_machines(environment):
            # a launch on one machine keeps to its loopback interface, which no other machine reaches
            os.environ["GLOO_SOCKET_IFNAME"] = xla.pod_interface()
        make_default_group(backend="gloo", rank=rank, world_size=size, store=store(), **limit)
    return XlaWorld(*numbers, device=device, backend="xla" if size > 1 else None)


def store_of_devices(limit: Mapping[str, timedelta]) -> dist.Store | None:
    """The store of a rendezvous that torch_xla knows the address of; `None` where a launcher's variables name all of the ranks'."""
    if "MASTER_ADDR" not in os.environ:
        return xla.rendezvous_store(limit)
    return xla.pod_rendezvous_store(limit) if xla.is_among_machines(os.environ) else None
