"""This process among the processes of a run."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.runtime.world.mesh import Mesh


@dataclass(frozen=True, slots=True)
class World:
    """One process among the others: its rank, its local rank, its device, and its connection to them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str | None
    # how the training of an `Accelerator` is spread over the ranks
    training_mesh: Mesh | None = None
    # of the ranks along an axis, the group that they talk over
    axis_group: Any = None

    @property
    def mesh(self) -> Mesh:
        """The degrees in which a training is spread over the ranks; copies of the model, where there is no `Accelerator`."""
        return self.training_mesh or Mesh(dp_replicate=self.size)

    @property
    def group(self) -> Any:
        """The process group over which ranks talk; `None` for one that is alone."""
        return self.axis_group or dist.group.WORLD

    @property
    def store(self) -> dist.Store:
        """The store of this group's rendezvous."""
        return dist.distributed_c10d._get_default_store()

    @property
    def exchange_world(self) -> World:
        """This world on the device that rows of bytes are sent from: its own, unless they travel between hosts."""
        return self

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def barrier(self) -> None:
        """Wait until every process has called this; nothing to wait for where there is one."""
        if self.size == 1:
            return
        # nccl needs its device, or it guesses one from the rank, which is another rank's on a second machine
        has_index = self.device.type == "cuda" and self.device.index is not None
        dist.barrier(self.axis_group, device_ids=[self.device.index] if has_index else None)

    def settle(self) -> None:
        """Have the device begin with all pending work; most begin at once."""

    def when_computed(self, report: Callable[[Any], None], values: Any) -> None:
        """Call `report` with values, a nest of tensors and other things, when what they are now can be read without waiting."""
        report(values)

    def report_deferred(self) -> None:
        """Report the values that still wait for being computed; all processes call it."""


def rank_numbers(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size: an existing group's, else by torchrun's variables, else of one alone."""
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        rank, size = number_in(environment, "RANK", 0), number_in(environment, "WORLD_SIZE", 1)
    local_rank, local_size = (
        number_in(environment, "LOCAL_RANK", rank),
        number_in(environment, "LOCAL_WORLD_SIZE", size),
    )
    if not 0 <= rank < size:
        raise LaunchError(
            f"RANK={rank} was given with WORLD_SIZE={size}, and ranks count from 0 to {size - 1}. "
            "Start the processes with a launcher, or correct the two variables."
        )
    return rank, size, local_rank, local_size


def make_default_group(**arguments: Any) -> None:
    """`torch.distributed.init_process_group` with these arguments."""
    dist.init_process_group(**arguments)
    # gloo's threads let go of tensors after a collective, which takes the interpreter; one that comes to it too late aborts the process
    atexit.unregister(_wait_for_threads)
    atexit.register(_wait_for_threads)
    if (device := arguments.get("device_id")) is not None and dist.group.WORLD is not None:
        # a default group that is not the process's first has no list of its ranks, and reads past its end when it is split
        # (`groupRanks` of ProcessGroupNCCL.cpp, torch 2.11): a device mesh would end the process
        backend: Any = dist.group.WORLD._get_backend(torch.device(device))
        backend.options.global_ranks_in_group = list(range(dist.get_world_size()))


def _wait_for_threads() -> None:
    # nothing tells when they have; the sleep leaves them the interpreter
    time.sleep(0.02)


def number_in(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    """The number that a variable holds, or `otherwise` for one that is not set."""
    text = environment.get(name, "")
    try:
        return int(text) if text else otherwise
    except ValueError:
        raise ConfigurationError(
            f"The environment variable {name} should be a whole number, but is {text!r}. Correct or remove it."
        ) from None
