"""Two devices of torch_xla's CPU backend that exchange tensors inside their programs, as those of a TPU do: by a thread each."""

import faulthandler
import importlib
import os
import pickle
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from tests.processes import python

LIMIT = 100.0


def on_connected_devices(function: Callable[[Any], Any], folder: Path, devices: int = 2) -> list[Any]:
    """
    The results of a function of a test module, which gets its device's world, on each device in their order.

    There is no other backend on which devices exchange anything. An `Accelerator` is the process's, so the function takes what
    stands below one.
    """
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "GLOO_SOCKET_IFNAME": "lo"}
    found, root = folder / f"{function.__name__}.pickle", Path(__file__).parents[2]
    words = ("-m", __name__, function.__module__, function.__name__, found)
    done = python(*words, folder=root, limit=LIMIT + 20, **variables)
    if not found.exists():
        raise RuntimeError(f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    results: list[Any] = pickle.loads(found.read_bytes())
    return results


def main(module: str, name: str, found: str) -> NoReturn:
    """Run the function in a thread for each device, and leave what it returned."""
    import torch.distributed as dist
    import torch_xla
    from torch_xla import runtime
    from torch_xla._internal import pjrt

    from accelerate_nb.runtime.xla import device as xla
    from accelerate_nb.runtime.xla.world import XlaWorld

    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    function = getattr(importlib.import_module(module), name)
    store, devices = dist.HashStore(), int(os.environ["CPU_NUM_DEVICES"])
    xla.sync = _sync_in_turn(devices)
    first_read = threading.Lock()

    def on_device() -> Any:
        rank, device = runtime.global_ordinal(), torch_xla.device()
        # the first read makes a counter, without a lock: two threads that make it together end the process
        with first_read:
            torch_xla._XLAC._xla_get_cpu_tensors([_zero(device)])
        gloo: Any = dist.ProcessGroupGloo
        group = gloo(store, rank, devices, timedelta(seconds=LIMIT))
        return function(XlaWorld(rank, devices, rank, devices, device, "xla", axis_group=group))

    results = pjrt._run_thread_per_device(0, 1, on_device, pjrt.initialize_multiprocess)
    Path(found).write_bytes(pickle.dumps([results[rank] for rank in sorted(results)]))
    # the runtime's own threads need not be waited for
    os._exit(0)


def _zero(device: Any) -> Any:
    import torch

    zero = torch.zeros((), device=device)
    zero.item()
    return zero


def _sync_in_turn(devices: int) -> Callable[[], None]:
    """A `sync` that the threads pass together: XLA's CPU backend ends a process in which one compiles while another waits for it."""
    import torch_xla
    import torch_xla.core.xla_model as model

    barrier, turn = threading.Barrier(devices), threading.Lock()

    def sync() -> None:
        device_name = torch_xla._XLAC._xla_get_default_device()
        barrier.wait()
        with turn:
            torch_xla._XLAC._xla_step_marker(device_name, [], wait=False, reset_scope=True)
        barrier.wait()
        model._run_step_closures()
        # not before all have begun: this waits until the program has ended, which needs the others
        torch_xla._XLAC._set_all_reduce_token(device_name, None)

    return sync


if __name__ == "__main__":
    main(*sys.argv[1:])
