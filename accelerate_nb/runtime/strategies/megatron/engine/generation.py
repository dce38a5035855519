"""Text that a model of Megatron's engine writes after a beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import ConfigurationError, NotYetError
from accelerate_nb.runtime.strategies.megatron.engine.arguments import get_args
from accelerate_nb.runtime.strategies.megatron.engine.masks import left_to_right
from accelerate_nb.runtime.strategies.megatron.engine.sampling import choose


def generate(
    engine: Any,
    inputs: Tensor,
    lengths: Tensor,
    longest: int,
    *,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
) -> Tensor:
    """
    The tokens of `inputs`, of the shape (samples, length), going on after `lengths` tokens each until all have `longest` or have ended.

    Every token computes the whole of its text again. The end of a text fills what comes after it.
    """
    from megatron.core import parallel_state

    args = get_args()
    _check(engine, longest)
    group = parallel_state.get_model_parallel_group()
    end = args.eos_token_id
    fill = 0 if end is None else end
    tokens = torch.full((len(inputs), longest), fill, dtype=torch.long, device=torch.cuda.current_device())
    tokens[:, : inputs.shape[1]] = inputs[:, :longest]
    has_ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for position in range(int(lengths.min()), longest):
        logits = _next_logits(engine, tokens[:, :position])[:, : args.orig_vocab_size]
        chosen = choose(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        # numbers that are drawn differ between processes
        dist.broadcast(chosen, dist.get_global_rank(group, 0), group)
        is_written = position >= lengths
        tokens[:, position] = torch.where(is_written & ~has_ended, chosen, tokens[:, position])
        tokens[:, position] = torch.where(is_written & has_ended, fill, tokens[:, position])
        if end is not None:
            has_ended |= is_written & (chosen == end)
        if bool(has_ended.all()):
            return tokens[:, : position + 1]
    return tokens


def _next_logits(engine: Any, tokens: Tensor) -> Tensor:
    """The logits of the token after these, of the shape (samples, words), on all processes of the model."""
    from megatron.core import tensor_parallel

    mask, _, positions = left_to_right(tokens, end_of_document=None, pad=None)

    def last_logits(output: Tensor, **_: Any) -> Tensor:
        own = output[:, -1].float().contiguous()
        gathered: Tensor = tensor_parallel.gather_from_tensor_model_parallel_region(own)
        return gathered

    def forward_step(iterator: Iterator[Any], chunk: Module) -> tuple[Any, Callable[..., Any]]:
        return chunk(next(iterator), positions, mask), last_logits

    found = engine.run_schedule(forward_step, [tokens], (tokens.shape[1], len(tokens)), True, collects=True)
    logits: Tensor = engine._from_last(found[0] if found else None)
    return logits


def _check(engine: Any, longest: int) -> None:
    args = get_args()
    if args.model_type_name != "gpt":
        raise NotYetError(
            f"megatron_generate was called with a model of the type {args.model_type_name}. It writes by models of the type gpt alone."
        )
    if engine.config.sequence_parallel:
        raise NotYetError(
            "megatron_generate was called with sequence_parallelism=True, whose parts of sequences a growing text does not divide into. "
            "Leave it out."
        )
    if len(engine.chunks) > 1:
        raise NotYetError(
            "megatron_generate was called with interleaved stages. Leave num_layers_per_virtual_pipeline_stage out."
        )
    if longest > args.max_position_embeddings:
        raise ConfigurationError(
            f"megatron_generate was asked for {longest} tokens, but the model has {args.max_position_embeddings} positions. Pass a smaller "
            "max_length or max_new_tokens."
        )
