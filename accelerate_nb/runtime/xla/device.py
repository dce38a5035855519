"""This rank's access to torch_xla: its numbers, its device, and the execution of the device's pending work."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.devices import xla as machine
from accelerate_nb.rank import lockstep
from accelerate_nb.rank_local import RankLocal, enter

# made once a rank, at the first use of its device: torch_xla begins with the same numbers in every process, whatever the seed
_seed: RankLocal[None] = RankLocal(lambda: machine.set_random_state(torch.initial_seed()))
# the port of torch_xla's own rendezvous, too
_PORT = 12355
# what is to be done before each sync of a rank
_before: RankLocal[list[Callable[[], object]]] = RankLocal(list)


def _discovered() -> str:
    from torch_xla._internal import tpu

    return str(tpu.discover_master_worker_ip())


# found once a rank: the ranks of all machines search it together
_main = RankLocal(_discovered)


def is_requested(environment: Mapping[str, str]) -> bool:
    """Whether this environment is that of a process which computes through torch_xla."""
    return bool(environment.get("PJRT_DEVICE")) and machine.is_installed()


def device_type() -> str:
    """The kind of device that torch_xla computes on: "TPU", "CUDA", "CPU"."""
    import torch_xla.runtime

    return str(torch_xla.runtime.device_type())


def device() -> torch.device:
    """This rank's device; the runtime wakes, its random numbers beginning with the last seed that torch was given."""
    import torch_xla

    machine.wake(int(os.environ.get("LOCAL_RANK") or 0), int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    found: torch.device = torch_xla.device()
    _seed.get()
    return found


def rank_numbers() -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size."""
    from torch_xla import runtime

    local = runtime.local_process_count() * runtime.addressable_device_count()
    return runtime.global_ordinal(), runtime.world_size(), runtime.local_ordinal(), local


def be_a_rank() -> None:
    """
    Make the calling thread a rank of its own where torch_xla runs one for each of several devices (`torch_xla.launch`).

    Ranks that our own launcher has made are that already.
    """
    if not machine.is_awake() or (ranks := threads()) == 1:
        return
    from torch_xla import runtime

    if enter(runtime.local_ordinal()) and device_type() == "CPU":
        lockstep.keep(_steps(ranks))


def threads() -> int:
    """The number of ranks in this process, once the runtime is awake: 1, or one for each device where those are threads."""
    from torch_xla import runtime

    return 1 if runtime.world_size() == 1 else int(runtime.addressable_device_count())


@functools.cache
def _steps(ranks: int) -> lockstep.Lockstep:
    """The lockstep that the ranks of this process pass together: they all have to find the same."""
    return lockstep.Lockstep(ranks)


def rendezvous_store(timeout: timedelta | None) -> dist.Store:
    """This rank's own connection to the rendezvous store of ranks that were given none: torch_xla knows its address."""
    import torch_xla.distributed.xla_backend  # noqa: F401 - makes the scheme known

    limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store: Any
    store, _, _ = next(iter(dist.rendezvous("xla://", **limit)))
    # the threads of a process share that connection, and one that waits in it would keep the others from answering
    return store.clone()  # type: ignore[no-any-return]  # torch's stubs don't know it


def is_among_machines(environment: Mapping[str, str]) -> bool:
    """Whether torch_xla connects this rank with some that the launch on this machine did not start: those of a TPU pod."""
    started = environment.get("WORLD_SIZE", "")
    return machine.is_awake() and started.isdecimal() and rank_numbers()[1] > int(started)


def address_of_main() -> str:
    """The address of the machine with the first rank, which all ranks have to request; a pod's machines are not numbered so."""
    return _main.get()


def pod_rendezvous_store(timeout: timedelta | None) -> dist.Store:
    """A connection to the store of a TPU pod's first rank: a launch on one machine knows of its own store alone."""
    limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    is_main = rank_numbers()[0] == 0
    return dist.TCPStore(address_of_main(), _PORT, None, is_main, wait_for_workers=False, **limit)


def machine_address() -> str:
    """The address of this machine under which a TPU pod's other machines find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # nothing is sent: the system only names the interface
        sock.connect((address_of_main(), _PORT))
        return str(sock.getsockname()[0])


def sync() -> None:
    """
    Have the device compute its pending work; returns before it has, in the same order on all ranks.

    Random numbers go on as if there had been no sync, so that what is drawn does not depend on how often there is one.
    """
    import torch_xla

    for call in list(_before.get()):
        call()
    together, state = lockstep.lockstep(), machine.random_state()
    if together is None:
        torch_xla.sync()
    else:
        _sync_in_turn(together)
    machine.set_random_state(state)


def _sync_in_turn(together: lockstep.Lockstep) -> None:
    """The steps of `torch_xla.sync`, by ranks that are threads of one process."""
    import torch_xla
    import torch_xla.core.xla_model as model

    device_name = torch_xla._XLAC._xla_get_default_device()
    # XLA's CPU backend ends a process in which one thread compiles while another waits for it in a collective for 10 seconds
    with together.turn():
        torch_xla._XLAC._xla_step_marker(device_name, [], wait=False, reset_scope=True)
    model._run_step_closures()
    # Not before all ranks have begun: this frees what the program has read, and so waits until the program has ended, which
    # it does not while another rank has to come to a collective; nor could that rank come, since Python is held meanwhile.
    torch_xla._XLAC._set_all_reduce_token(device_name, None)


def before_sync(call: Callable[[], object]) -> None:
    """Have a call made before each sync of this rank from now on, when what was synced before may be read."""
    if call not in _before.get():
        _before.get().append(call)


def are_computed(tensors: Sequence[Tensor]) -> bool:
    """Whether the device computes all of these tensors already, so that they can be read without a sync."""
    import torch_xla

    return not any(torch_xla._XLAC._check_tensor_need_materialization(list(tensors)))


def average_in_place(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by the mean over all ranks, when the device comes to it; all ranks call it."""
    import torch_xla.core.xla_model as model
    from torch_xla import runtime

    if tensors and (size := runtime.world_size()) > 1:
        model.all_reduce(model.REDUCE_SUM, list(tensors), scale=1.0 / size, pin_layout=False)


def gathered(tensor: Tensor) -> Tensor:
    """Every rank's tensor, joined along dimension 0, as the device will compute it; it has dimensions, and numbers in them."""
    import torch_xla.core.xla_model as model

    found: Tensor = model.all_gather(tensor, pin_layout=False)
    return found


def reduced(tensor: Tensor, reduction: str, scale: float = 1.0) -> Tensor:
    """The "sum", "max" or "min" over all ranks as a new tensor, as the device will compute it."""
    import torch_xla.core.xla_model as model

    found: Tensor = model.all_reduce(reduction, tensor, scale=scale, pin_layout=False)
    return found


def number_of(tensor: Tensor) -> int:
    """The number of the device's tensor; it stays the same when the tensor is detached."""
    import torch_xla

    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))


def as_data(tensor: Tensor, device: torch.device) -> Tensor:
    """
    A copy of a tensor on the device that is an input of the program, whatever its numbers are.

    `to` writes a single 0 or 1 into the program instead, which then differs between ranks where the number does.
    """
    import torch_xla.core.xla_model as model

    (sent,) = model.send_cpu_data_to_device([tensor], device)
    return sent  # type: ignore[no-any-return]  # a list of what it was given


def to_cpu(data: Any) -> Any:
    """The same nest of lists, tuples and dictionaries with copies of its tensors on the CPU, brought in one transfer."""
    import torch_xla.core.xla_model as model

    return model._maybe_convert_to_cpu(data)


def memory() -> dict[str, int]:
    """
    The total and the used bytes of the device's memory, under torch_xla's names.

    "bytes_used", "bytes_limit" and, where the device says it, "peak_bytes_used"; empty where it says nothing, as a CPU.
    """
    import torch_xla.core.xla_model as model

    try:
        return {name: int(number) for name, number in model.get_memory_info(device()).items()}
    except RuntimeError:
        return {}


def wait() -> None:
    """Wait until the device has computed what it was given, and raise what went wrong there; nothing where there is none."""
    if machine.is_awake():
        import torch_xla.core.xla_model as model

        model.wait_device_ops()


@contextmanager
def traced(folder: str) -> Iterator[None]:
    """
    A block whose work on this process's devices is written to a folder for TensorBoard's profile plugin, once a process.

    Nothing where no device is awake: there is nothing to see.
    """
    if not machine.is_awake() or not _leads_process():
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


def _leads_process() -> bool:
    """Whether this rank is the first of those that are threads of its process."""
    from torch_xla import runtime

    return threads() == 1 or runtime.local_ordinal() % threads() == 0


def compilations() -> int:
    """The number of programs that this process has compiled for its devices; those of all ranks that are its threads."""
    from torch_xla.debug import metrics

    data = metrics.metric_data("CompileTime")
    return 0 if data is None else int(data[0])
