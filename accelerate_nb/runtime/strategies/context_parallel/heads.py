"""The exchange of heads (Ulysses, arXiv:2309.14509): each process attends over whole sequences with some of the heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """The processes that have parts of the same sequences."""

    group: Any
    size: int

    def attention(
        self, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """
        The output for this process's queries; `attend` computes it for whole sequences.

        All are of shape (batch, heads, length of a part, width). `ConfigurationError` for heads that the processes do not divide.
        """
        for name, tensor in {"queries": query, "keys": key}.items():
            if tensor.shape[1] % self.size:
                raise ConfigurationError(
                    f"The exchange of heads was requested along cp={self.size}, but it does not divide the {tensor.shape[1]} heads of "
                    f"{name}. Take a degree that does, or TorchContextParallelConfig(attention='ring')."
                )
        whole = [_ToHeads.apply(tensor, self.group, self.size) for tensor in (query, key, value)]  # type: ignore[no-untyped-call]
        output: Tensor = _ToSequence.apply(attend(*whole, **options), self.group, self.size)  # type: ignore[no-untyped-call]
        return output


def _to_heads(tensor: Tensor, group: Any, size: int) -> Tensor:
    """From (batch, heads, length / size, width) to (batch, heads / size, length, width)."""
    sent = torch.stack(tensor.chunk(size, 1))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), 2)


def _to_sequence(tensor: Tensor, group: Any, size: int) -> Tensor:
    """From (batch, heads / size, length, width) to (batch, heads, length / size, width)."""
    sent = torch.stack(tensor.chunk(size, 2))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), 1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, size: int) -> Tensor:
        ctx.places = group, size
        return _to_heads(tensor, group, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _to_sequence(gradient, *ctx.places), None, None


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, size: int) -> Tensor:
        ctx.places = group, size
        return _to_sequence(tensor, group, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _to_heads(gradient, *ctx.places), None, None
