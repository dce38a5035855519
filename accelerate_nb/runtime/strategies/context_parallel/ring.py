"""Ring attention (Liu et al., arXiv:2310.01889): each process attends with its queries to all processes' keys, a part at a time."""

# With causal attention a process has a piece from the beginning of sequences and one from the end, so that all compute equally much
# (as in torch's `context_parallel` and arXiv:2311.09431).

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate_nb.runtime.strategies.context_parallel import kernels


@dataclass(frozen=True, slots=True)
class Ring:
    """The processes that have parts of the same sequences, and how keys come to them: gathered at once, or handed around."""

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
            following = self._pass_on(keys) if step < size - 1 else None
            yield source, keys
            if following is not None:
                keys = following.wait()

    def _pass_on(self, tensor: Tensor) -> _Transfer:
        size = len(self.ranks)
        received = torch.empty_like(tensor)
        following, former = self.ranks[(self.rank + 1) % size], self.ranks[(self.rank - 1) % size]
        return _Transfer(
            dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, tensor, following, group=self.group),
                    dist.P2POp(dist.irecv, received, former, group=self.group),
                ]
            ),
            received,
        )

    def to_owners(self, gradients: Sequence[Tensor]) -> Tensor:
        """The sum of what all processes found for this process's keys; `gradients` are by owners."""
        sent = torch.stack(list(gradients))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.sum(0)


@dataclass(frozen=True, slots=True)
class _Transfer:
    works: Sequence[Any]
    received: Tensor

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


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
            found, exponents, of_kernel = kernels.forward(
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
            of_queries, *of_block = kernels.backward(
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
