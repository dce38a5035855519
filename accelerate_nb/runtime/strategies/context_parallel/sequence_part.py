"""The part of each sequence that a process has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import ConfigurationError, DataError

# Classes whose state goes along the sequence: torch's, by their bases, and those of transformers and others, by their names.
_RECURRENT = re.compile("RNN|LSTM|GRU|Recurrent|Mamba|RWKV|Rwkv|DeltaNet|LinearAttention")
# The types of layers with such a state in configurations of transformers, and of short convolutions along the sequence.
_RECURRENT_TYPES = re.compile("linear_attention|hybrid|conv")


@dataclass(frozen=True, slots=True)
class SequencePart:
    """
    The part of sequences that a rank of so many has: consecutive ones, or, where they are `balanced`, a piece from the beginning and
    one from the end, so that causal attention takes equally long on all.

    >>> SequencePart(rank=0, size=2, balanced=True).positions(8).tolist()
    [0, 1, 6, 7]
    """

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

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """The positions, in sequences of this whole length, of what this rank has: int64 of shape (length / size,)."""
        return self.cut(torch.arange(length, device=device), 0)


def refuse_recurrent(model: Module, requested: str) -> None:
    """`ConfigurationError` for a model with layers whose state goes along the sequence, of which a process would have a part."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {kind: kind for kind in getattr(text, "layer_types", None) or () if _RECURRENT_TYPES.search(kind)}
    for name, layer in model.named_modules():
        if any(_RECURRENT.search(base.__name__) for base in type(layer).__mro__):
            found.setdefault(type(layer).__name__, f"{type(layer).__name__} ({name or 'the model itself'})")
    if found:
        setting = requested.partition("=")[0]
        raise ConfigurationError(
            f"{requested} was requested for {type(model).__name__}, which has recurrent layers: {', '.join(found.values())}. Their state "
            "goes along the sequence, and each process would begin it anew in its part, which gives wrong gradients. Take a model of "
            f"attention layers, or leave {setting} out."
        )
