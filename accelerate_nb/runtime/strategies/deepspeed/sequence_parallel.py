"""Sequences that DeepSpeed splits (Ulysses, arXiv:2309.14509, as ALST has it for transformers, arXiv:2506.13996)."""

from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, functional as F
from torch.utils.hooks import RemovableHandle

from accelerate_nb.errors import ConfigurationError, DataError
from accelerate_nb.runtime.compat.packages import compare_versions
from accelerate_nb.runtime.parallelism_config import DeepSpeedSequenceParallelConfig
from accelerate_nb.runtime.strategies import context_parallel
from accelerate_nb.runtime.world.world import World

# The first version with the functions that Accelerate calls.
_VERSION = "0.18.2"
# These make a mask of all pairs of tokens, or attend by themselves; DeepSpeed's and Accelerate's classes refuse them too.
_UNKNOWN_ATTENTIONS = ("eager", "paged|eager", "flex_attention")


class SequenceParallel:
    """Each process has consecutive tokens of every sequence, and attends over whole sequences with some of the heads."""

    # While a model is registered, its attention function is DeepSpeed's for all models of transformers in this process.

    def __init__(self, world: World, config: DeepSpeedSequenceParallelConfig) -> None:
        if not compare_versions("deepspeed", ">=", _VERSION):
            raise ConfigurationError(
                f"sp_size={world.mesh.sp} was requested, and DeepSpeed splits sequences from version {_VERSION} on. "
                "Update it: pip install -U deepspeed"
            )
        self._config, self._size = config, world.mesh.sp
        rank = world.mesh.coordinates(world.rank).get("sp", 0)
        part = context_parallel.SequencePart(rank, self._size, balanced=False)
        self._batches = context_parallel.SequenceBatches(part)
        self._batch_size: int | None = None
        # the name of the function that is replaced, and the function
        self._replaced: tuple[str, Any] | None = None
        # whether the model computes a batch of whole sequences, as in an evaluation
        self._is_whole = False
        self._hooks: list[RemovableHandle] = []

    def register(self, model: Module, batch_size: int | None) -> Any:
        """Replace the attention, for batches of so many sequences; returns DeepSpeed's module of groups. All processes call it."""
        attention = self._check(model)
        if batch_size is None:
            raise ConfigurationError(
                f"sp_size={self._size} was requested, and DeepSpeed's configuration has no train_micro_batch_size_per_gpu, which the "
                "split needs. Write it there, or 'auto' for the loader's batch_size."
            )
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        functions: Any = ALL_ATTENTION_FUNCTIONS
        whole = functions[attention]
        self._replaced, self._batch_size = (attention, whole), batch_size
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        groups = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=attention,
            sequence_parallel_size=self._size,
            micro_batch_size=batch_size,
            seq_length=self._config.sp_seq_length,
            seq_length_is_variable=self._config.sp_seq_length_is_variable,
        )
        functions[attention] = partial(self._attend, whole, functions[attention])
        self._hooks = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            # after an error, too
            model.register_forward_hook(self._exit, always_call=True),
        ]
        return groups

    def _attend(
        self, whole: Any, exchanging: Any, module: Any, query: Tensor, key: Tensor, *arguments: Any, **keywords: Any
    ) -> Any:
        """The attention of transformers' own function, or of DeepSpeed's."""
        if not self._is_whole:
            return exchanging(module, query, key, *arguments, **keywords)
        if hasattr(module, "num_key_value_groups"):
            # where heads of keys are fewer than processes, DeepSpeed has left the number of its parts there
            module.num_key_value_groups = query.shape[1] // key.shape[1]
        return whole(module, query, key, *arguments, **keywords)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, model: Module, arguments: Any, keywords: Mapping[str, Any]) -> None:
        values = (*arguments, *keywords.values())
        self._is_whole = keywords.get("shift_labels") is None and not any(
            isinstance(value, Tensor) and self._batches.is_part(value) for value in values
        )
        if self._is_whole and model.training:
            raise DataError(
                f"The model that trains got a batch that is not cut for sp_size={self._size}, as loaders give it that were prepared in a "
                "call without the model. Give both to one call of prepare, or pass the loader on: "
                "accelerator.deepspeed_ulysses_dl_adapter(loader, model). Whoever cuts batches passes shift_labels to the model."
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _exit(self, *_called: Any) -> None:
        self._is_whole = False

    def _check(self, model: Module) -> str:
        """The name of the attention to replace."""
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "get_text_config"):
            raise ConfigurationError(
                f"sp_size={self._size} was requested, and DeepSpeed splits the sequences of transformers' models alone, of which "
                f"{type(model).__name__} is none. Leave sp_size out."
            )
        context_parallel.refuse_recurrent(model, f"sp_size={self._size}")
        text = config.get_text_config()
        heads = text.num_attention_heads
        of_keys = getattr(text, "num_key_value_heads", None) or heads
        # DeepSpeed gives a process some heads of keys, or several processes the same one
        if heads % self._size or (of_keys % self._size and self._size % of_keys):
            raise ConfigurationError(
                f"sp_size={self._size} was requested for a model of {heads} heads, {of_keys} of them for keys, which it does not "
                "divide. Pass a size that divides both."
            )
        found = getattr(config, "_attn_implementation", None)
        wanted = self._config.sp_attn_implementation or found
        if found in _UNKNOWN_ATTENTIONS or wanted != found:
            raise ConfigurationError(
                f"sp_attn_implementation={wanted!r} was requested, but the model attends by {found!r}. Make both the same: "
                "from_pretrained(..., attn_implementation='sdpa'), or a flash attention."
            )
        return str(wanted)

    def average_over_all(self, engine: Any) -> None:
        """Have the engine divide gradients by the number of all processes, as for copies of a model."""
        # Its stages 0 to 2, and 3 without `reduce_scatter`, divide by the number of replicas alone, though a loss that each process of a
        # sequence gathers from all of them has their gradients as many times (DeepSpeed 0.19.8; 3 divides by all).
        for part in (engine, engine.optimizer):
            if hasattr(part, "sequence_parallel_size"):
                part.sequence_parallel_size = 1

    def release(self) -> None:
        """Give transformers its attention back, so that another model can be registered."""
        if self._replaced is None:
            return
        name, function = self._replaced
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS[name] = function
        for hook in self._hooks:
            hook.remove()
        self._replaced = self._batch_size = None
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        # a second registration asserts that there are none
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None

    # Batches

    def cut(self, batch: Any) -> Any:
        """The batch with this process's tokens, as DeepSpeed's own loader has it: `position_ids` of whole sequences, and `shift_labels`."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            raise DataError(
                f"A batch has to be cut for sp_size={self._size}, but has no input_ids of shape (sequences, tokens). Make batches "
                "mappings with input_ids and labels, as collators of transformers do."
            )
        if self._batch_size not in (None, len(ids)):
            raise DataError(
                f"A batch of {len(ids)} sequences came, but DeepSpeed splits batches of {self._batch_size} "
                "(train_micro_batch_size_per_gpu). Pass drop_last=True to the loader."
            )
        length, expected = ids.shape[1], self._config.sp_seq_length
        if not self._config.sp_seq_length_is_variable and length != expected:
            raise DataError(
                f"A batch of sequences of length {length} came, but sp_seq_length={expected} was requested with "
                "sp_seq_length_is_variable=False. Pad them to it, or leave sp_seq_length_is_variable out."
            )
        whole: Any = copy(batch)
        if whole.get("position_ids") is None:
            whole["position_ids"] = torch.arange(length, device=ids.device).expand(ids.shape)
        labels = whole.pop("labels", None)
        if labels is not None and whole.get("shift_labels") is None:
            whole["shift_labels"] = F.pad(labels, (0, 1), value=context_parallel.IGNORED_LABEL)[:, 1:]
        return self._batches.cut(whole)
