"""The notebook's random states: a worker starts from them, as a forked process would."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RandomStates:
    """Python's state, and numpy's and torch's (CPU) where the notebook has imported them."""

    python: Any
    numpy: Any
    torch: Any

    def install(self) -> None:
        """Continue from these states in this process."""
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy

            numpy.random.set_state(self.numpy)
        if self.torch is not None:
            import torch

            torch.set_rng_state(self.torch)


def random_states_here() -> RandomStates:
    """The states of this process; they are only read."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return RandomStates(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.random.get_state(),
        torch=None if torch is None else torch.get_rng_state(),
    )
