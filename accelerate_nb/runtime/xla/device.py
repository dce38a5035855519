"""This rank's access to torch_xla: its numbers, its device, and the execution of the device's pending work."""

import functools
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.devices import xla as machine

# the port of torch_xla's own rendezvous, too
_PORT = 12355


@dataclass(eq=False)
class _SyncHooks:
    """What is to be done before each sync of this process."""

    calls: list[Callable[[], object]] = field(default_factory=list)


_hooks = _SyncHooks()


def is_requested(environment: Mapping[str, str]) -> bool:
    """Whether this environment is that of a process which computes through torch_xla."""
    return bool(environment.get("PJRT_DEVICE")) and machine.is_installed()


def _torch_xla() -> Any:
    """The package, which is loaded at its first use."""
    import torch_xla.core.xla_model
    import torch_xla.runtime

    return torch_xla


def device_type() -> str:
    """The kind of device that torch_xla computes on: "TPU", "CUDA", "CPU"."""
    return str(_torch_xla().runtime.device_type())


def device() -> torch.device:
    """This rank's device; the runtime wakes, its random numbers beginning with the last seed that torch was given."""
    machine.wake(int(os.environ.get("LOCAL_RANK") or 0), int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    found: torch.device = _torch_xla().device()
    _set_first_seed()
    return found


@functools.cache
def _set_first_seed() -> None:
    """At the first use of the device: torch_xla begins with the same numbers in every process, whatever the seed."""
    machine.set_random_state(torch.initial_seed())


def rank_numbers() -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size."""
    runtime = _torch_xla().runtime
    return runtime.global_ordinal(), runtime.world_size(), runtime.local_ordinal(), runtime.local_device_count()


def devices_in_process() -> int:
    """The number of devices of which torch_xla makes a rank each in this process: 1, or more where those would be threads."""
    runtime = _torch_xla().runtime
    return 1 if runtime.world_size() == 1 else int(runtime.addressable_device_count())


def are_connected() -> bool:
    """Whether the ranks' devices exchange tensors inside their programs; the CPU devices of several processes do not."""
    return int(_torch_xla().runtime.world_size()) > 1


def rendezvous_store(limit: Mapping[str, Any]) -> dist.Store:
    """This rank's connection to the rendezvous store of ranks that were given none: torch_xla knows its address."""
    import torch_xla.distributed.xla_backend  # noqa: F401 - makes the scheme known

    store: dist.Store
    store, _, _ = next(iter(dist.rendezvous("xla://", **limit)))
    return store


def is_among_machines(environment: Mapping[str, str]) -> bool:
    """Whether torch_xla connects this rank with some that the launch on this machine did not start: those of a TPU pod."""
    started = environment.get("WORLD_SIZE", "")
    return machine.is_awake() and started.isdecimal() and rank_numbers()[1] > int(started)


@functools.cache
def address_of_main() -> str:
    """The address of the machine with the first rank, which all ranks have to request; a pod's machines are not numbered so."""
    from torch_xla._internal import tpu

    return str(tpu.discover_master_worker_ip())


def pod_rendezvous_store(limit: Mapping[str, Any]) -> dist.Store:
    """A connection to the store of a TPU pod's first rank: a launch on one machine knows of its own store alone."""
    is_main = rank_numbers()[0] == 0
    return dist.TCPStore(address_of_main(), _PORT, None, is_main, wait_for_workers=False, **limit)


def pod_interface() -> str:
    """The network interface of this machine under which a TPU pod's other machines find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # nothing is sent: the system only names the address
        sock.connect((address_of_main(), _PORT))
        address = sock.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    return next(name for name, entries in interfaces if any(entry.address == address for entry in entries))


def sync() -> None:
    """Have the device compute its pending work; returns before it has, in the same order on all ranks."""
    for call in list(_hooks.calls):
        call()
    # random numbers go on as if there had been no sync: what is drawn does not depend on how often there is one
    state = machine.random_state()
    _torch_xla().sync()
    machine.set_random_state(state)


def before_sync(call: Callable[[], object]) -> None:
    """Have a call made before each sync from now on, when what was synced before may be read."""
    if call not in _hooks.calls:
        _hooks.calls.append(call)


def are_computed(tensors: Sequence[Tensor]) -> bool:
    """Whether the device computes all of these tensors already, so that they can be read without a sync."""
    return not any(_torch_xla()._XLAC._check_tensor_need_materialization(list(tensors)))


def average_in_place(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by the mean over all ranks, when the device comes to it; all ranks call it."""
    if tensors and (size := _torch_xla().runtime.world_size()) > 1:
        model = _torch_xla().core.xla_model
        model.all_reduce(model.REDUCE_SUM, list(tensors), scale=1.0 / size, pin_layout=False)


def gathered(tensor: Tensor) -> Tensor:
    """Every rank's tensor, joined along dimension 0, as the device will compute it; it has dimensions, and numbers in them."""
    found: Tensor = _torch_xla().core.xla_model.all_gather(tensor, pin_layout=False)
    return found


def reduced(tensor: Tensor, reduction: str, scale: float = 1.0) -> Tensor:
    """The "sum", "max" or "min" over all ranks as a new tensor, as the device will compute it."""
    found: Tensor = _torch_xla().core.xla_model.all_reduce(reduction, tensor, scale=scale, pin_layout=False)
    return found


def number_of(tensor: Tensor) -> int:
    """The number of the device's tensor; it stays the same when the tensor is detached."""
    return int(_torch_xla()._XLAC._xla_get_tensor_id(tensor))


def as_data(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor on the device that is an input of the program, whatever its numbers are."""
    # `to` writes a single 0 or 1 into the program, which then differs between ranks where the number does
    (sent,) = _torch_xla().core.xla_model.send_cpu_data_to_device([tensor], device)
    return sent  # type: ignore[no-any-return]  # a list of what it was given


def to_cpu(data: Any) -> Any:
    """The same nest of lists, tuples and dictionaries with copies of its tensors on the CPU, brought in one transfer."""
    return _torch_xla().core.xla_model._maybe_convert_to_cpu(data)


def memory() -> dict[str, int]:
    """Bytes of the device's memory: "bytes_used", "bytes_limit" and perhaps "peak_bytes_used"; empty where a device says nothing."""
    try:
        return {name: int(number) for name, number in _torch_xla().core.xla_model.get_memory_info(device()).items()}
    except RuntimeError:
        return {}


def wait() -> None:
    """Wait until the device has computed what it was given, and raise what went wrong there; nothing where there is none."""
    if machine.is_awake():
        _torch_xla().core.xla_model.wait_device_ops()


@contextmanager
def traced(folder: str) -> Iterator[None]:
    """A block whose work on this process's awake devices is written to a folder for TensorBoard's profile plugin."""
    if not machine.is_awake():
        yield
        return
    from torch_xla.debug import profiler

    os.makedirs(folder, exist_ok=True)
    profiler.start_trace(folder)
    try:
        yield
        wait()
    finally:
        profiler.stop_trace()


def compilations() -> int:
    """The number of programs that this process has compiled for its device."""
    from torch_xla.debug import metrics

    data = metrics.metric_data("CompileTime")
    return 0 if data is None else int(data[0])
