"""Losses and tensors of the processes that have copies of a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.runtime.operations.nested import tensors_of, with_leaves


def avg_losses_across_data_parallel_group(losses: list[Tensor]) -> Tensor:
    """The means of losses (each a number) over the copies of a model, one tensor of the shape `(len(losses),)`, without a graph."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    summed = torch.stack([loss.detach().reshape(()).clone() for loss in losses])
    dist.all_reduce(summed, group=group)
    return summed.div_(float(group.size()))


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """The tensors of all copies of a model, joined along dimension 0; nested in lists, tuples or mappings."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()

    def gathered(item: Tensor) -> Tensor:
        own = (item[None] if item.ndim == 0 else item).contiguous()
        found = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(found, own, group=group)
        return torch.cat(found)

    return with_leaves(tensor, map(gathered, tensors_of("gather", tensor)))
