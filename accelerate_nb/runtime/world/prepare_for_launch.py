"""The wrapper of a function for processes that another launcher has started."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from accelerate_nb.runtime.compat.enums import DistributedType
from accelerate_nb.runtime.world.state import PartialState

# Processes whose rank such launchers do not set: those of `torch.multiprocessing.start_processes`.
_NEED_A_RANK = ("GPU", "MLU", "MUSA", "NPU", "XPU", "CPU", "NEURON")


class PrepareForLaunch:
    """
    A function as `torch.multiprocessing.start_processes` calls it, with the process's index first.

    The index becomes `LOCAL_RANK` and `RANK`, from `NPROC` and `NODE_RANK`, in runs of several devices; with `debug` the
    rendezvous uses the file that `ACCELERATE_DEBUG_RDV_FILE` names.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: DistributedType | str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        if self.debug:
            size = int(os.environ["WORLD_SIZE"])
            store = dist.FileStore(os.environ["ACCELERATE_DEBUG_RDV_FILE"], size)
            dist.init_process_group("gloo", rank=index, store=store, world_size=size)
        elif self.distributed_type.value.removeprefix("MULTI_") in _NEED_A_RANK:
            before = int(os.environ.get("NPROC", "1")) * int(os.environ.get("NODE_RANK", "0"))
            os.environ.update(LOCAL_RANK=str(index), RANK=str(before + index))
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)


def test_launch() -> None:
    """Join the world, to see that it can be joined."""
    PartialState()
