"""DeepSpeed with one of its reductions taken out of this process: every rank's own numbers count for all ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def take_out(reduction: str) -> None:
    """Take out the mean of gradients, or the sum of the parts of their norm; others stay, and all ranks still meet."""
    from deepspeed import comm

    original = comm.all_reduce
    takes_mean = "mean" in reduction

    def all_reduce(tensor: Tensor, op: Any = None, **options: Any) -> Any:
        # gradients are summed without an operation being named, the parts of a norm with it
        is_mean = op is None
        if takes_mean and is_mean:
            return _own(tensor)
        if not takes_mean and op == comm.ReduceOp.SUM and tensor.numel() == 1:
            return None
        return original(tensor, **({} if op is None else {"op": op}), **options)

    def reduce_scatter(output: Tensor, tensor: Tensor, **options: Any) -> None:
        output.copy_(torch.chunk(tensor, dist.get_world_size())[dist.get_rank()] * dist.get_world_size())

    comm.all_reduce = all_reduce
    if takes_mean:
        comm.reduce = lambda tensor, *_, **__: _own(tensor)
        comm.reduce_scatter_fn = reduce_scatter


def _own(tensor: Tensor) -> None:
    tensor.mul_(dist.get_world_size())
