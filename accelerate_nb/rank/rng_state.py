"""The notebook's random states: a worker starts from them, as a forked process would."""

import random
import sys
from dataclasses import dataclass
from typing import Any

from accelerate_nb.devices.xla import random_state, set_random_state


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The random states of Python, and of numpy and torch (CPU, GPUs, torch_xla) where they are imported."""

    # without `cuda` and `tpu` these begin with the last seed that torch was given, as in a process that has touched
    # none

    python: Any
    numpy: Any
    torch: Any
    cuda: Any = None
    tpu: int | None = None

    def install(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy

            numpy.random.set_state(self.numpy)
        if self.torch is not None:
            import torch

            torch.set_rng_state(self.torch)
            if self.cuda is None:
                torch.cuda.manual_seed_all(torch.initial_seed())
            else:
                torch.cuda.set_rng_state_all(self.cuda)
            set_random_state(torch.initial_seed() if self.tpu is None else self.tpu)


def current_random_states(*, gpus: bool = False) -> RandomStates:
    """The states of this process, with those of the GPUs that it has touched where they are wanted; they are only read."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    touched = gpus and torch is not None and torch.cuda.is_initialized()
    return RandomStates(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.random.get_state(),
        torch=None if torch is None else torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state_all() if touched and torch is not None else None,
        tpu=random_state() if gpus else None,
    )
