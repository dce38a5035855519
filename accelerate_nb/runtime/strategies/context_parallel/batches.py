"""The parts of a batch's sequences, and what models of transformers need to know of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_nb.errors import DataError
from accelerate_nb.runtime.strategies.context_parallel.sequence_part import SequencePart

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
