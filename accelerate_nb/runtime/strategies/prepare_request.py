"""One object of a call of `prepare`, with what was requested for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate_nb.runtime.training.compile import TorchDynamoPlugin


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """
    A model or an optimizer that a strategy is to prepare; whatever else a call has is no part of it.

    `places` is whether it comes to this process's device, `trains` whether a model gets gradients, or is only evaluated.
    """

    value: Any
    compiling: TorchDynamoPlugin
    places: bool = True
    trains: bool = True
