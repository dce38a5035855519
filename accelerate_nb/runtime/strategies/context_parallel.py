"""Context parallelism: processes have parts of the same sequences, and a model's attention goes over all of them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import Module, functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_nb.errors import ConfigurationError, DataError
from accelerate_nb.runtime.parallelism_config import TorchContextParallelConfig
from accelerate_nb.runtime.precision.base import replace_forward
from accelerate_nb.runtime.world.registry import along
from accelerate_nb.runtime.world.world import World

_ATTACHED = "_accelerate_nb_context_parallel"
# Classes whose state goes along the sequence: torch's, by their bases, and those of transformers and others, by their names.
_RECURRENT = re.compile("RNN|LSTM|GRU|Recurrent|Mamba|RWKV|Rwkv|DeltaNet|LinearAttention")
# The types of layers with such a state in configurations of transformers, and of short convolutions along the sequence.
_RECURRENT_TYPES = re.compile("linear_attention|hybrid|conv")
# The label that losses leave out, as torch and transformers have it.
IGNORED_LABEL = -100
_ops = torch.ops.aten


@dataclass(frozen=True, slots=True)
class SequencePart:
    """A rank's part of sequences: consecutive tokens, or, `balanced` for causal attention, a piece of each end."""

    rank: int
    size: int
    balanced: bool

    def cut(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole tensor along a dimension; `DataError` for a length that can't be cut so."""
        length = tensor.shape[dim]
        pieces = 2 * self.size if self.balanced else self.size
        if length % pieces:
            raise DataError(
                f"A sequence of length {length} should be cut in {pieces} equal pieces for {self.size} processes. Pad sequences to "
                f"a multiple of {pieces} (pad_to_multiple_of={pieces} in collators of transformers)."
            )
        parts = tensor.chunk(pieces, dim)
        if not self.balanced:
            return parts[self.rank].contiguous()
        return torch.cat([parts[self.rank], parts[pieces - 1 - self.rank]], dim)


def refuse_recurrent(model: Module, requested: str) -> None:
    """`ConfigurationError` for a model with layers whose state goes along the sequence, of which a process would have a part."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {kind: kind for kind in getattr(text, "layer_types", None) or () if _RECURRENT_TYPES.search(kind)}
    for name, layer in model.named_modules():
        if any(_RECURRENT.search(base.__name__) for base in type(layer).__mro__):
            found.setdefault(type(layer).__name__, f"{type(layer).__name__} ({name or 'the model itself'})")
    if found:
        raise ConfigurationError(
            f"{requested} was requested for {type(model).__name__}, which has recurrent layers: {', '.join(found.values())}. Their state "
            "goes along the sequence, and each process would begin it anew in its part, which gives wrong gradients. Take a model of "
            f"attention layers, or leave {requested.partition('=')[0]} out."
        )


@dataclass(eq=False)
class SequenceBatches:
    """Cuts the sequences of batches, and remembers which tensors are parts."""

    part: SequencePart
    # parts with what else belongs to them: of labels the shifted ones, and the number of labels that count, for each process
    parts: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def is_part(self, tensor: Tensor) -> bool:
        """Whether a tensor is a part that was cut here."""
        return tensor in self.parts

    def cut(self, batch: Any) -> Any:
        """The batch with this process's part of each sequence: of tensors as long as `input_ids`, or the first, along dimension 1."""
        # with causal attention no token sees padding at the end, so that such an attention_mask is left out
        inputs = [batch.get(name) for name in ("input_ids", "inputs_embeds")] if isinstance(batch, Mapping) else []
        sequences = [leaf for leaf in (*inputs, *tree_leaves(batch)) if isinstance(leaf, Tensor) and leaf.ndim > 1]
        if not sequences:
            return batch
        length = sequences[0].shape[1]

        def part_of(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.ndim < 2 or leaf.shape[1] != length:
                return leaf
            found = self.part.cut(leaf, 1)
            self.parts[found] = {}
            return found

        if not isinstance(batch, Mapping):
            return tree_map(part_of, batch)
        found: Any = copy(batch)
        if "attention_mask" in batch:
            _check_mask(found.pop("attention_mask"))
        found.update({name: tree_map(part_of, value) for name, value in found.items()})
        labels = batch.get("labels")
        if "input_ids" in batch and isinstance(labels, Tensor) and self.is_part(found["labels"]):
            # each token's label is the next token's, which may be in another part; the mean is over all parts' labels
            shifted = batch.get("shift_labels")
            following = F.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:] if shifted is None else shifted
            self.parts[found["labels"]] = {
                "shift_labels": self.part.cut(following, 1),
                "num_items_in_batch": (following != IGNORED_LABEL).sum() / self.part.size,
            }
        return found


def _check_mask(mask: Any) -> None:
    if isinstance(mask, Tensor) and mask.ndim == 2:
        # once it hides a token it hides all later ones
        if not (mask.bool()[:, 1:] & ~mask.bool()[:, :-1]).any():
            return
        what = "hides tokens before others that it shows"
    else:
        what = f"is a {type(mask).__name__}" + (f" of {mask.ndim} dimensions" if isinstance(mask, Tensor) else "")
    raise DataError(
        f"The attention_mask of a batch {what}, but sequences that are cut in parts know causal attention alone. Pad at the end "
        "(padding_side='right'), or leave the mask out."
    )


# Attention over parts: in a ring of processes (arXiv:2310.01889), or by an exchange of heads (Ulysses, arXiv:2309.14509)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Sequence[Any]]:
    """Output, log-sum-exp (batch, heads, length) in float32, and what `_gradients` needs, of (batch, heads, length, width)."""
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
    tensors: Sequence[Tensor], kept: Sequence[Any], *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values; `tensors` are the output's gradient, these, output and log-sum-exp over all keys."""
    gradients: Any = _ops._scaled_dot_product_flash_attention_for_cpu_backward
    if tensors[0].device.type != "cpu":
        gradients = _ops._scaled_dot_product_flash_attention_backward
    found: tuple[Tensor, Tensor, Tensor] = gradients(*tensors, *kept[:4], 0.0, is_causal, *kept[4:], scale=scale)
    return found


@dataclass(frozen=True, slots=True)
class Ring:
    """The processes with parts of the same sequences, and how keys come to them: gathered at once, or handed around."""

    # balanced pieces as in torch's `context_parallel` and arXiv:2311.09431

    group: Any
    ranks: Sequence[int]
    rank: int
    gathers: bool

    def blocks(self, keys: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each process's keys, which may be stacked with values, with its index, beginning with this process's."""
        size = len(self.ranks)
        sources = [(self.rank - step) % size for step in range(size)]
        if self.gathers:
            found = [torch.empty_like(keys) for _ in sources]
            dist.all_gather(found, keys, group=self.group)
            yield from ((source, found[source]) for source in sources)
            return
        following, former = self.ranks[(self.rank + 1) % size], self.ranks[(self.rank - 1) % size]
        for source in sources[:-1]:
            # the next keys come while these are used
            received = torch.empty_like(keys)
            sending = dist.P2POp(dist.isend, keys, following, group=self.group)
            receiving = dist.P2POp(dist.irecv, received, former, group=self.group)
            works = dist.batch_isend_irecv([sending, receiving])
            yield source, keys
            for work in works:
                work.wait()
            keys = received
        yield sources[-1], keys

    def to_owners(self, gradients: Sequence[Tensor]) -> Tensor:
        """The sum of what all processes found for this process's keys; `gradients` are by owners."""
        sent = torch.stack(list(gradients))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.sum(0)


def _needed(rank: int, source: int, length: int, *, is_causal: bool) -> tuple[slice, slice, bool]:
    """The queries of a rank that attend to keys of another one, these keys, and whether each attends to those before it alone."""
    first, second, whole = slice(0, length // 2), slice(length // 2, length), slice(0, length)
    if not is_causal or rank == source:
        return whole, whole, is_causal
    return (whole, first, False) if source < rank else (second, whole, False)


class _Attention(torch.autograd.Function):
    """The output for this process's queries; all are of shape (batch, heads, length of a part, width)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, is_causal: bool, scale: float | None
    ) -> Tensor:
        query, keys = query.contiguous(), torch.stack([key, value])
        output = torch.zeros_like(query, dtype=torch.float32)
        logsumexp = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
        kept = []
        for source, block in ring.blocks(keys):
            queries, of_block, causal = _needed(ring.rank, source, query.shape[2], is_causal=is_causal)
            own, (key, value) = query[:, :, queries].contiguous(), block[:, :, :, of_block].unbind()
            found, exponents, of_kernel = _attend(own, key, value, is_causal=causal, scale=scale)
            kept.append(of_kernel)
            former = logsumexp[:, :, queries]
            together = torch.logaddexp(former, exponents)
            output[:, :, queries] *= (former - together).exp().unsqueeze(-1)
            output[:, :, queries] += (exponents - together).exp().unsqueeze(-1) * found
            logsumexp[:, :, queries] = together
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
            queries, of_block, causal = _needed(ring.rank, source, query.shape[2], is_causal=ctx.is_causal)
            given, own, attended, exponents = (
                tensor[:, :, queries].contiguous() for tensor in (gradient, query, output, logsumexp)
            )
            key, value = block[:, :, :, of_block].unbind()
            tensors = (given, own, key, value, attended, exponents)
            of_queries, *found = _gradients(tensors, of_kernel, is_causal=causal, scale=ctx.scale)
            of_query[:, :, queries] += of_queries
            of_keys[source][:, :, :, of_block] = torch.stack(found).float()
        of_key, of_value = ring.to_owners(of_keys).to(keys.dtype).unbind()
        return of_query.to(query.dtype), of_key, of_value, None, None, None


def exchange_heads(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, group: Any, size: int, **options: Any
) -> Tensor:
    """The output for this process's queries of (batch, heads, length of a part, width); `attend` computes whole sequences of some heads."""
    for name, tensor in {"queries": query, "keys": key}.items():
        if tensor.shape[1] % size:
            raise ConfigurationError(
                f"The exchange of heads was requested along cp={size}, but it does not divide the {tensor.shape[1]} heads of "
                f"{name}. Take a degree that does, or TorchContextParallelConfig(attention='ring')."
            )

    def exchanged(tensor: Tensor, cut_along: int, joined_along: int) -> Tensor:
        sent = torch.stack(tensor.chunk(size, cut_along))
        received = all_to_all_single(torch.empty_like(sent), sent, group=group)
        return torch.cat(received.unbind(), joined_along)

    # (batch, heads, length / size, width) becomes (batch, heads / size, length, width), and back
    whole = [exchanged(tensor, 1, 2) for tensor in (query, key, value)]
    return exchanged(attend(*whole, **options), 2, 1)


# A model


class ContextParallel:
    """Cuts batches, and has the models that it is attached to attend over all parts."""

    # it stands for torch's scaled_dot_product_attention until `close`, in backwards too, which recompute; calls of others are passed on

    def __init__(self, world: World, handler: TorchContextParallelConfig) -> None:
        self._group = group = along("cp")
        is_ring = handler.attention == "ring"
        self.batches = SequenceBatches(SequencePart(group.rank, group.size, balanced=is_ring))
        self.cuts_batches = handler.cuts_batches
        self._ring: Ring | None = None
        if is_ring:
            ranks = world.mesh.ranks_along(world.rank, "cp")
            self._ring = Ring(group.group, ranks, group.rank, gathers=handler.cp_comm_strategy == "allgather")
        self._depth = self._calls = 0
        self.is_attending = False
        self._plain = plain = getattr(F.scaled_dot_product_attention, "__wrapped__", F.scaled_dot_product_attention)

        @wraps(plain)
        def scaled_dot_product_attention(*arguments: Any, **keywords: Any) -> Any:
            if self._depth == 0 and torch._C._current_graph_task_id() == -1:
                return plain(*arguments, **keywords)
            return self._attend(*arguments, **keywords)

        scaled_dot_product_attention.__wrapped__ = plain
        F.scaled_dot_product_attention = scaled_dot_product_attention

    def close(self) -> None:
        """Give the function back."""
        F.scaled_dot_product_attention = self._plain

    # Attention

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self._calls += 1
        if attn_mask is not None:
            raise ConfigurationError(
                f"The model attends with a mask of shape {tuple(attn_mask.shape)}, but sequences that are cut in parts know causal "
                "attention (is_causal=True) and attention to all alone. Leave the mask out."
            )
        if query.shape[2] != key.shape[2]:
            raise ConfigurationError(
                f"The model attends with {query.shape[2]} queries to {key.shape[2]} keys, but parts of a sequence have equally many. "
                "Generate text, and attend to other sequences, with `accelerator.unwrap_model(model)` of a training without cp."
            )
        groups = query.shape[1] // key.shape[1]
        if enable_gqa and groups > 1:
            key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
        if self._ring is None:
            options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
            return exchange_heads(self._whole, query, key, value, self._group.group, self._group.size, **options)
        if dropout_p:
            raise ConfigurationError(
                f"The model's attention leaves out {dropout_p:.0%} of its weights, which ring attention can't. Set its attention dropout "
                "to 0, or pass TorchContextParallelConfig(attention='heads')."
            )
        output: Tensor = _Attention.apply(query, key, value, self._ring, is_causal, scale)  # type: ignore[no-untyped-call]
        return output

    def _whole(self, *arguments: Any, **keywords: Any) -> Any:
        """Attention of whole sequences, as torch has it."""
        self.is_attending = True
        try:
            return self._plain(*arguments, **keywords)
        finally:
            self.is_attending = False

    # Models

    def attach(self, model: Module) -> Module:
        """The same model, which from now on attends over all parts; `ConfigurationError` for one that attends in another way."""
        if model.__dict__.get(_ATTACHED) is self:
            return model
        refuse_recurrent(model, f"cp_size={self.batches.part.size}")
        model.__dict__[_ATTACHED] = self
        config = getattr(model, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            _check_transformers(type(model).__name__, config)
            model.register_forward_pre_hook(self._complete_arguments, with_kwargs=True)
            for name, module in model.named_modules():
                if name.endswith("self_attn"):
                    module.register_forward_pre_hook(_causal, with_kwargs=True)
        check = _FirstForward(self, self._plain)

        def attending(forward: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(forward)
            def attending_forward(*arguments: Any, **keywords: Any) -> Any:
                self._depth += 1
                check.begin(self._calls)
                output: Any = None
                try:
                    output = forward(*arguments, **keywords)
                finally:  # after an interrupt, too, for which torch calls no hooks
                    self._depth -= 1
                    check.end(self._calls, ended=output is not None)
                return output

            return attending_forward

        model._forward_of_sequences = replace_forward(model, attending)
        return model

    def __deepcopy__(self, _memo: dict[int, Any]) -> "ContextParallel":
        return self  # a copied model attends over the same parts

    def _complete_arguments(self, _model: Module, arguments: Any, keywords: dict[str, Any]) -> Any:
        """Positions in the whole sequence, and labels that are shifted over the ends of parts, where a call leaves them out."""
        given = (keywords.get("input_ids"), keywords.get("inputs_embeds"), *arguments[:1])
        inputs = next((value for value in given if value is not None), None)
        keywords = dict(keywords)
        if isinstance(inputs, Tensor) and keywords.get("position_ids") is None:
            part = self.batches.part
            positions = torch.arange(inputs.shape[1] * part.size, device=inputs.device)
            keywords["position_ids"] = part.cut(positions, 0).expand(inputs.shape[0], -1)
        labels = keywords.get("labels")
        if labels is not None and keywords.get("shift_labels") is None:
            found = self.batches.parts.get(labels)
            if not found:
                raise DataError(
                    "The model was called with labels that are not those of a prepared loader's batch, so that the label after a part's "
                    "end is not known. Pass batch['labels'], or shift_labels besides, which were cut like input_ids."
                )
            keywords = {**found, **keywords}
        return arguments, keywords

    # Batches

    @contextmanager
    def cut_buffers(self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Sequence[Tensor]) -> Iterator[None]:
        """A block in which tensors are parts of themselves, along these dimensions; those in `kept` are afterwards, too."""
        if len(buffers) != len(dims):
            raise ConfigurationError(
                f"{len(buffers)} buffers were passed with {len(dims)} dimensions. Pass one in buffer_seq_dims for each."
            )
        whole = [(tensor, dim) for tensor, dim in zip(buffers, dims, strict=True) if not self.batches.is_part(tensor)]
        former = [(tensor, tensor.clone()) for tensor, _ in whole if not any(tensor is other for other in kept)]
        for tensor, dim in whole:
            part = self.batches.part.cut(tensor, dim).clone()
            tensor.resize_(part.shape).copy_(part)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            for tensor, values in former:
                tensor.resize_(values.shape).copy_(values)


class _FirstForward(TorchFunctionMode):
    """Checks in a model's first forward that it attends by what is replaced: a function imported by name before sees one part alone."""

    def __init__(self, parallel: ContextParallel, plain: Callable[..., Tensor]) -> None:
        super().__init__()
        self.parallel, self.plain = parallel, plain
        self._before: int | None = None
        self._is_done = False

    def begin(self, calls: int) -> None:
        if not self._is_done and self._before is None and not torch.compiler.is_compiling():
            self._before = calls
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, calls: int, *, ended: bool) -> None:
        if self._before is None or self._is_done:
            return
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._is_done = True
        if ended and calls == self._before:
            raise ConfigurationError(
                "The model never called torch.nn.functional.scaled_dot_product_attention, which is how it attends to the other parts "
                "of sequences that are cut. Write its attention with that function, or leave cp_size out."
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.plain and not self.parallel.is_attending:
            raise ConfigurationError(
                "The model calls a scaled_dot_product_attention that was imported by this name, which attends to one part of a sequence "
                "alone. Write `torch.nn.functional.scaled_dot_product_attention(...)` there."
            )
        return func(*args, **(kwargs or {}))


def _causal(_module: Module, arguments: Any, keywords: dict[str, Any]) -> Any:
    """No mask for an attention of transformers, which makes its own of positions: parts attend as the whole does (as Accelerate)."""
    if "attention_mask" in keywords:
        keywords = {**keywords, "attention_mask": None, "is_causal": True}
    return arguments, keywords


def _check_transformers(name: str, config: Any) -> None:
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if config._attn_implementation != "sdpa":
        raise ConfigurationError(
            f"cp was requested for {name}, which attends by {config._attn_implementation!r}. Load it with attn_implementation='sdpa'."
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        kinds = {"sliding_attention"}
    if kinds:
        raise ConfigurationError(
            f"cp was requested for {name}, which has layers of {', '.join(sorted(kinds))}. Sequences that are cut in parts know full "
            "causal attention alone: take another model, or leave cp_size out."
        )
