"""Complete weights by Megatron's names, made of those of transformers as they are read, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.megatron.conversion.layouts import ConvertedWeight

_NAMED_FIRST = 8


class ConvertedWeights(Mapping[str, Tensor]):
    """Weights of transformers by Megatron's names; each is put together when it is read, so that a model is never there twice."""

    def __init__(self, weights: Sequence[ConvertedWeight], source: Mapping[str, Tensor]) -> None:
        _compare({name for weight in weights for name in weight.sources}, source, "transformers")
        self._weights = {weight.name: weight for weight in weights}
        self._source = source

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        return weight.layout.join([self._source[source].detach() for source in weight.sources])

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def by_transformers_names(weights: Sequence[ConvertedWeight], complete: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Complete weights of Megatron as tensors of their own, by the names of transformers."""
    _compare({weight.name for weight in weights}, complete, "Megatron")
    found: dict[str, Tensor] = {}
    for weight in weights:
        tensors = weight.layout.split(complete[weight.name])
        made = {id(tensor): tensor.contiguous().clone() for tensor in tensors}
        found |= {name: made[id(tensor)] for name, tensor in zip(weight.sources, tensors, strict=True)}
    return found


def _compare(wanted: set[str], found: Mapping[str, Tensor], library: str) -> None:
    missing, unknown = sorted(wanted - set(found)), sorted(set(found) - wanted)
    if missing or unknown:
        said = [
            f"{word} {len(names)}, such as {', '.join(names[:_NAMED_FIRST])}"
            for word, names in (("it lacks", missing), ("it has beyond them", unknown))
            if names
        ]
        raise ConfigurationError(
            f"A model of {library} was to be converted, whose weights are not those of its configuration: {', and '.join(said)}. Pass a "
            "model without adapters or other layers of its own, and its own configuration."
        )
