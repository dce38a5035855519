"""A full copy of the model on every XLA device; gradients are averaged before the optimizer steps."""

from __future__ import annotations

from accelerate_nb.runtime.strategies.base import Strategy


class Replicas(Strategy):
    """A full copy of the model on every XLA device; gradients are averaged before the optimizer steps."""
