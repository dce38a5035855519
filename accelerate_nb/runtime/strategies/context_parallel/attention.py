"""Attention over parts of sequences: in a ring of processes (arXiv:2310.01889), or by an exchange of heads (Ulysses, arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.errors import ConfigurationError

_ops = torch.ops.aten


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Sequence[Any]]:
    """
    The output, the logarithms of the sums of exponentials, of shape (batch, heads, length) in float32, and what `_gradients` needs.

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


def _gradients(
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


@dataclass(frozen=True, slots=True)
class Ring:
    """
    The processes that have parts of the same sequences, and how keys come to them: gathered at once, or handed around.

    With causal attention a process has a piece from the beginning of sequences and one from the end, so that all compute equally much
    (as in torch's `context_parallel` and arXiv:2311.09431).
    """

    group: Any
    ranks: Sequence[int]
    rank: int
    gathers: bool

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None = None
    ) -> Tensor:
        """The output for this process's queries; all are of shape (batch, heads, length of a part, width)."""
        output: Tensor = _Attention.apply(query, key, value, self, is_causal, scale)  # type: ignore[no-untyped-call]
        return output

    def blocks(self, keys: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each process's keys, which may be stacked with values, with its index, beginning with this process's."""
        size = len(self.ranks)
        sources = [(self.rank - step) % size for step in range(size)]
        if self.gathers:
            found = [torch.empty_like(keys) for _ in sources]
            dist.all_gather(found, keys, group=self.group)
            yield from ((source, found[source]) for source in sources)
            return
        for step, source in enumerate(sources):
            # the next keys come while these are used
            works, received = self._pass_on(keys) if step < size - 1 else ([], keys)
            yield source, keys
            for work in works:
                work.wait()
            keys = received

    def _pass_on(self, tensor: Tensor) -> tuple[list[Any], Tensor]:
        size = len(self.ranks)
        received = torch.empty_like(tensor)
        following, former = self.ranks[(self.rank + 1) % size], self.ranks[(self.rank - 1) % size]
        sending = dist.P2POp(dist.isend, tensor, following, group=self.group)
        receiving = dist.P2POp(dist.irecv, received, former, group=self.group)
        return dist.batch_isend_irecv([sending, receiving]), received

    def to_owners(self, gradients: Sequence[Tensor]) -> Tensor:
        """The sum of what all processes found for this process's keys; `gradients` are by owners."""
        sent = torch.stack(list(gradients))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.sum(0)


@dataclass(frozen=True, slots=True)
class _Needed:
    """The part of a process's queries that attends to a part of another one's keys, from these indices on, and to which end."""

    queries: slice
    keys: slice
    is_causal: bool

    @classmethod
    def of(cls, rank: int, source: int, length: int, *, is_causal: bool) -> _Needed:
        half = length // 2
        if not is_causal or rank == source:
            return cls(slice(0, length), slice(0, length), is_causal)
        if source < rank:
            return cls(slice(0, length), slice(0, half), False)
        return cls(slice(half, length), slice(0, length), False)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, is_causal: bool, scale: float | None
    ) -> Tensor:
        query, keys = query.contiguous(), torch.stack([key, value])
        output = torch.zeros_like(query, dtype=torch.float32)
        logsumexp = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
        kept = []
        for source, block in ring.blocks(keys):
            part = _Needed.of(ring.rank, source, query.shape[2], is_causal=is_causal)
            own = query[:, :, part.queries].contiguous()
            found, exponents, of_kernel = _attend(
                own, *block[:, :, :, part.keys].unbind(), is_causal=part.is_causal, scale=scale
            )
            kept.append(of_kernel)
            former = logsumexp[:, :, part.queries]
            together = torch.logaddexp(former, exponents)
            output[:, :, part.queries] *= (former - together).exp().unsqueeze(-1)
            output[:, :, part.queries] += (exponents - together).exp().unsqueeze(-1) * found
            logsumexp[:, :, part.queries] = together
        output = output.to(query.dtype)
        ctx.save_for_backward(query, keys, output, logsumexp)
        ctx.ring, ctx.is_causal, ctx.scale, ctx.kept = ring, is_causal, scale, kept
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, keys, output, logsumexp = ctx.saved_tensors
        ring: Ring = ctx.ring
        of_query = torch.zeros_like(query, dtype=torch.float32)
        of_keys: list[Tensor] = [torch.zeros_like(keys, dtype=torch.float32) for _ in ring.ranks]
        for (source, block), of_kernel in zip(ring.blocks(keys), ctx.kept, strict=True):
            part = _Needed.of(ring.rank, source, query.shape[2], is_causal=ctx.is_causal)
            key, value = block[:, :, :, part.keys].unbind()
            of_queries, *of_block = _gradients(
                gradient[:, :, part.queries].contiguous(),
                query[:, :, part.queries].contiguous(),
                key,
                value,
                output[:, :, part.queries].contiguous(),
                logsumexp[:, :, part.queries].contiguous(),
                of_kernel,
                is_causal=part.is_causal,
                scale=ctx.scale,
            )
            of_query[:, :, part.queries] += of_queries
            of_keys[source][:, :, :, part.keys] = torch.stack(of_block).float()
        of_key, of_value = ring.to_owners(of_keys).to(keys.dtype).unbind()
        return of_query.to(query.dtype), of_key, of_value, None, None, None


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
        # (batch, heads, length / size, width) becomes (batch, heads / size, length, width), and back
        whole = [_Exchange.apply(tensor, self.group, self.size, 1, 2) for tensor in (query, key, value)]  # type: ignore[no-untyped-call]
        output: Tensor = _Exchange.apply(attend(*whole, **options), self.group, self.size, 2, 1)  # type: ignore[no-untyped-call]
        return output


class _Exchange(torch.autograd.Function):
    """Each process gives the others parts of a tensor along one dimension, and joins what it gets along another one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, size: int, cut_along: int, joined_along: int) -> Tensor:
        ctx.places = group, size, joined_along, cut_along
        sent = torch.stack(tensor.chunk(size, cut_along))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), joined_along)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Exchange.apply(gradient, *ctx.places), None, None, None, None  # type: ignore[no-untyped-call]
