"""Attention of some queries to some keys, with what is needed to add it to attention to others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accelerate_nb.errors import ConfigurationError

_ops = torch.ops.aten


def forward(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Sequence[Any]]:
    """
    The output, the logarithms of the sums of exponentials, of shape (batch, heads, length) in float32, and what `backward` needs.

    Queries, keys and values have the shape (batch, heads, length, width).
    """
    if query.device.type == "cpu":
        output, logsumexp = _ops._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
        return output, logsumexp, ()
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ConfigurationError(
            f"Ring attention was requested for {query.dtype} on {query.device}, where it computes in 16 bits alone. Pass "
            "mixed_precision='bf16', or TorchContextParallelConfig(attention='heads')."
        )
    output, logsumexp, *kept = _ops._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    # without the mask for debugging, which comes last
    return output, logsumexp, kept[:-1]


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    kept: Sequence[Any],
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values; `output` and `logsumexp` are those of attention to all keys."""
    found: tuple[Tensor, Tensor, Tensor]
    if query.device.type == "cpu":
        found = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, logsumexp, 0.0, is_causal, scale=scale
        )
        return found
    lengths, random = kept[:4], kept[4:]
    found = _ops._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, output, logsumexp, *lengths, 0.0, is_causal, *random, scale=scale
    )
    return found
