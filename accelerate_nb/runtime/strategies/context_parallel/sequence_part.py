"""The part of each sequence that a process has, and the parts of batches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, functional as F
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

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


# The label that losses leave out, as torch and transformers have it.
_IGNORED = -100


class SequenceBatches:
    """Cuts the sequences of batches, and remembers which tensors are parts."""

    def __init__(self, part: SequencePart) -> None:
        self.part = part
        # parts with what else belongs to them: of labels the shifted ones, and the number of labels that count, for each process
        self._parts = WeakIdKeyDictionary()

    def is_part(self, tensor: Tensor) -> bool:
        """Whether a tensor is a part that was cut here."""
        return tensor in self._parts

    def for_loss(self, labels: Tensor) -> dict[str, Tensor] | None:
        """The arguments with which a model of transformers computes the loss of these labels; `None` for labels from elsewhere."""
        found: dict[str, Tensor] | None = self._parts.get(labels)
        return found or None

    def cut(self, batch: Any) -> Any:
        """
        The batch with this process's part of each sequence.

        Sequences are the tensors with two dimensions or more whose second one is as long as that of `input_ids` (or
        `inputs_embeds`), or of the first such tensor. An `attention_mask` that hides padding at the end alone is left out: with
        causal attention no token sees what comes later.
        """
        length = _sequence_length(batch)
        if length is None:
            return batch
        if isinstance(batch, Mapping) and "attention_mask" in batch:
            _check_mask(batch["attention_mask"])
            whole = {name: value for name, value in batch.items() if name != "attention_mask"}
        else:
            whole = batch

        def part_of(leaf: Any) -> Any:
            is_sequence = isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[1] == length
            return self._cut(leaf) if is_sequence else leaf

        if not isinstance(batch, Mapping):
            return tree_map(part_of, whole)
        found: Any = copy(batch)
        found.pop("attention_mask", None)
        found.update({name: tree_map(part_of, value) for name, value in whole.items()})
        if "input_ids" in batch and isinstance(labels := batch.get("labels"), Tensor) and self.is_part(found["labels"]):
            self._parts[found["labels"]] = self._loss_arguments(labels, batch.get("shift_labels"))
        return found

    def _cut(self, tensor: Tensor) -> Tensor:
        found = self.part.cut(tensor, 1)
        self._parts[found] = {}
        return found

    def _loss_arguments(self, labels: Tensor, shifted: Tensor | None) -> dict[str, Tensor]:
        """Each token's label is the next token's, which may be in another part; the mean is over all parts' labels."""
        whole = F.pad(labels, (0, 1), value=_IGNORED)[:, 1:] if shifted is None else shifted
        return {
            "shift_labels": self.part.cut(whole, 1),
            "num_items_in_batch": (whole != _IGNORED).sum() / self.part.size,
        }


def _sequence_length(batch: Any) -> int | None:
    if isinstance(batch, Mapping):
        for name in ("input_ids", "inputs_embeds"):
            if isinstance(value := batch.get(name), Tensor) and value.ndim > 1:
                return value.shape[1]
    found = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim > 1), None)
    return None if found is None else found.shape[1]


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
