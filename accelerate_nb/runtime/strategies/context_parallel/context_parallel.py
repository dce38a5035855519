"""Context parallelism: processes have parts of the same sequences, and a model's attention goes over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, functional as F
from torch.overrides import TorchFunctionMode

from accelerate_nb.errors import ConfigurationError, DataError
from accelerate_nb.runtime.parallelism_config import TorchContextParallelConfig
from accelerate_nb.runtime.strategies.context_parallel.attention import HeadExchange, Ring
from accelerate_nb.runtime.strategies.context_parallel.sequence_part import (
    SequenceBatches,
    SequencePart,
    refuse_recurrent,
)
from accelerate_nb.runtime.world.registry import along
from accelerate_nb.runtime.world.world import World

_ATTACHED = "_accelerate_nb_context_parallel"


class ContextParallel:
    """
    Cuts batches, and has the models that it is attached to attend over all parts.

    From its beginning to `close` it stands in the place of `torch.nn.functional.scaled_dot_product_attention`, and passes on the calls that are
    not of these models. A backward computes some of a model's forward once more, so calls in a backward are the models', too.
    """

    def __init__(self, world: World, handler: TorchContextParallelConfig) -> None:
        group = along("cp")
        is_ring = handler.attention == "ring"
        part = SequencePart(group.rank, group.size, balanced=is_ring)
        self.batches = SequenceBatches(part)
        self.cuts_batches = handler.cuts_batches
        self._way: Ring | HeadExchange
        if is_ring:
            ranks = world.mesh.ranks_along(world.rank, "cp")
            self._way = Ring(group.group, ranks, group.rank, gathers=handler.cp_comm_strategy == "allgather")
        else:
            self._way = HeadExchange(group.group, group.size)
        self._depth = self._calls = 0
        self.is_attending = False
        self._plain = _plain_attention()
        F.scaled_dot_product_attention = self._attention()

    def close(self) -> None:
        """Give the function back."""
        F.scaled_dot_product_attention = _plain_attention()

    # Attention

    def _attention(self) -> Any:
        plain = self._plain

        @wraps(plain)
        def scaled_dot_product_attention(*arguments: Any, **keywords: Any) -> Tensor:
            if self._depth == 0 and torch._C._current_graph_task_id() == -1:
                found: Tensor = plain(*arguments, **keywords)
                return found
            attended: Tensor = self._attend(*arguments, **keywords)
            return attended

        scaled_dot_product_attention.__wrapped__ = plain
        return scaled_dot_product_attention

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
        if isinstance(self._way, HeadExchange):
            options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
            return self._way.attention(self._whole, query, key, value, **options)
        if dropout_p:
            raise ConfigurationError(
                f"The model's attention leaves out {dropout_p:.0%} of its weights, which ring attention can't. Set its attention dropout "
                "to 0, or pass TorchContextParallelConfig(attention='heads')."
            )
        return self._way.attention(query, key, value, is_causal=is_causal, scale=scale)

    def _whole(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Attention of whole sequences, as torch has it."""
        self.is_attending = True
        try:
            found: Tensor = self._plain(*arguments, **keywords)
            return found
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
        model.register_forward_pre_hook(lambda *_: self._enter(check), prepend=True)
        # after an error there is no output
        model.register_forward_hook(lambda *called: self._exit(check, ended=called[2] is not None), always_call=True)
        return model

    def _enter(self, check: _FirstForward) -> None:
        self._depth += 1
        check.begin(self._calls)

    def _exit(self, check: _FirstForward, *, ended: bool) -> None:
        self._depth -= 1
        check.end(self._calls, ended=ended)

    def _complete_arguments(self, _model: Module, arguments: Any, keywords: dict[str, Any]) -> Any:
        """Positions in the whole sequence, and labels that are shifted over the ends of parts, where a call leaves them out."""
        inputs = next(
            (keywords[name] for name in ("input_ids", "inputs_embeds") if keywords.get(name) is not None), None
        )
        inputs = arguments[0] if inputs is None and arguments else inputs
        keywords = dict(keywords)
        if isinstance(inputs, Tensor) and keywords.get("position_ids") is None:
            part = self.batches.part
            positions = part.positions(inputs.shape[1] * part.size, inputs.device)
            keywords["position_ids"] = positions.expand(inputs.shape[0], -1)
        labels = keywords.get("labels")
        if labels is not None and keywords.get("shift_labels") is None:
            found = self.batches.for_loss(labels)
            if found is None:
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
        whole = [tensor for tensor in buffers if not self.batches.is_part(tensor)]
        former = [(tensor, tensor.clone()) for tensor in whole if not any(tensor is other for other in kept)]
        for tensor, dim in zip(buffers, dims, strict=True):
            if any(tensor is other for other in whole):
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
    """
    Checks in a model's first forward that it attends, and in the way that is replaced.

    A function that was imported by its name before would attend to one part alone, and nobody would notice.
    """

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


def _plain_attention() -> Any:
    """Torch's own function."""
    found: Any = F.scaled_dot_product_attention
    return getattr(found, "__wrapped__", found)
