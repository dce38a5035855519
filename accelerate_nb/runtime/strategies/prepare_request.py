"""One object of a call of `prepare`, with what was requested for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate_nb.runtime.training.compile import TorchDynamoPlugin


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """
    A model or an optimizer that a strategy is to prepare; whatever else a call has is no part of it.

    `is_placed` is whether it comes to this process's device, `is_trained` whether a model gets gradients, or is only evaluated.
    """

    value: Any
    compiling: TorchDynamoPlugin
    is_placed: bool = True
    is_trained: bool = True
