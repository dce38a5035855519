"""The part of each sequence that a process has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accelerate_nb.errors import DataError


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
