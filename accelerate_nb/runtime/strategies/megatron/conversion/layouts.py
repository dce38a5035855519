"""How Megatron lays out a weight that transformers keeps in another form; each is a permutation, so that both ways are exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelerate_nb.errors import ConfigurationError


class Layout:
    """The same tensor in both."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Megatron's tensor, of those of transformers."""
        return tensors[0]

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of transformers, of Megatron's."""
        return [tensor]


class Transposed(Layout):
    """A weight of shape (inputs, outputs), as `Conv1D` of GPT-2 has it; Megatron has (outputs, inputs)."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].t()

    def split(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.t()]


@dataclass(frozen=True)
class Words(Layout):
    """
    A row for each word, by so many names where input and output share them.

    Megatron may have rows beyond `size`, so that ranks get equal parts. They repeat the last word's, as Megatron-LM's converters
    have it: rows of zeros would win over words whose logits are all negative, as those of GPT-2 are.
    """

    size: int
    padded_size: int
    names: int = 1

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        words = tensors[0]
        padding = self.padded_size - words.shape[0]
        return torch.cat([words, words[-1:].expand(padding, -1)]) if padding else words

    def split(self, tensor: Tensor) -> list[Tensor]:
        if tensor.shape[0] < self.size:
            raise ConfigurationError(
                f"A configuration with vocab_size={self.size} was passed, but the model of Megatron has {tensor.shape[0]} words. Pass the "
                "configuration of the model that it was made of."
            )
        return [tensor[: self.size]] * self.names


@dataclass(frozen=True)
class QueriesKeysValues(Layout):
    """
    Weights or biases of queries, keys and values: one after the other in transformers, in one tensor or in three.

    Megatron has a group of heads after the other, each with its queries, its key and its value.
    """

    heads: int
    groups: int
    channels: int
    is_one: bool = False
    is_transposed: bool = False

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        found = [tensor.t() if self.is_transposed else tensor for tensor in tensors]
        if self.is_one:
            found = list(found[0].split(self._rows))
        return torch.cat([tensor.view(self.groups, -1, *tensor.shape[1:]) for tensor in found], 1).flatten(0, 1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        if tensor.shape[0] != sum(self._rows):
            raise ConfigurationError(
                f"A configuration with {self.heads} heads of {self.channels} channels and {self.groups} of keys was passed, which are "
                f"{sum(self._rows)} rows, but a layer of the model of Megatron has {tensor.shape[0]}. Pass the configuration of the model "
                "that it was made of."
            )
        rows = [count // self.groups for count in self._rows]
        parts = tensor.view(self.groups, -1, *tensor.shape[1:]).split(rows, 1)
        found = [part.flatten(0, 1) for part in parts]
        if self.is_one:
            found = [torch.cat(found)]
        return [part.t() if self.is_transposed else part for part in found]

    @property
    def _rows(self) -> list[int]:
        return [count * self.channels for count in (self.heads, self.groups, self.groups)]


class GateAndUp(Layout):
    """Two layers of a gated perceptron, one after the other in Megatron."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors))

    def split(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.chunk(2))


SAME = Layout()


@dataclass(frozen=True)
class ConvertedWeight:
    """A complete weight of Megatron by its name, and the names in transformers of what it is made of."""

    name: str
    sources: tuple[str, ...]
    layout: Layout = SAME


def weights_of_words(config: Any, embeddings: str, words: int) -> Iterator[ConvertedWeight]:
    """The weights that have a row for each word: the embeddings of this name, and the head, which may be the same."""
    name, head = "embedding.word_embeddings.weight", "lm_head.weight"
    if config.tie_word_embeddings:
        yield ConvertedWeight(name, (embeddings, head), Words(config.vocab_size, words, names=2))
    else:
        yield ConvertedWeight(name, (embeddings,), Words(config.vocab_size, words))
        yield ConvertedWeight("output_layer.weight", (head,), Words(config.vocab_size, words))
