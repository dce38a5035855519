"""A family of transformers models as Megatron computes it; pure, so that it is known before a process has a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.megatron.conversion.layouts import ConvertedWeight

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    **dict.fromkeys(
        ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh"), partial(functional.gelu, approximate="tanh")
    ),
}


@dataclass(frozen=True)
class Architecture:
    """
    What a transformers configuration is in Megatron.

    `settings` are those of a `TransformerConfig`, `arguments` those of a `GPTModel`; `weights` tells the complete weights for so many
    rows of words.
    """

    settings: Mapping[str, Any]
    arguments: Mapping[str, Any]
    weights: Callable[[int], Sequence[ConvertedWeight]]
    embedding_dropout: float = field(default=0.0)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of an activation by its name in transformers."""
    if name not in _ACTIVATIONS:
        raise ConfigurationError(
            f"A model with the activation {name!r} was to become one of Megatron, where {', '.join(_ACTIVATIONS)} are known here. Take a "
            "model with one of them."
        )
    return _ACTIVATIONS[name]


def refuse(kind: str, config: Any, refused: Mapping[str, bool]) -> None:
    """Raise `ConfigurationError` that names the settings of a configuration for which Megatron has no counterpart."""
    if names := [f"{name}={getattr(config, name, None)!r}" for name, is_refused in refused.items() if is_refused]:
        raise ConfigurationError(
            f"A {kind} with {', '.join(names)} was to become a model of Megatron, whose layers do not compute that. Take a model without "
            "it, or train this one with strategy='fsdp' or 'tp'."
        )
