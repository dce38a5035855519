"""The notebook's random states and settings of torch, NumPy and warnings: a worker starts from them, as a forked process would."""

import random
import sys
import warnings
from collections.abc import Mapping
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


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """The type of new tensors and how torch computes, where the notebook has set that."""

    dtype: Any
    # whether algorithms are deterministic, and whether others only warn
    deterministic: tuple[bool, bool]
    matmul_precision: str
    # cuDNN's `benchmark` and `deterministic`
    cudnn: tuple[bool, bool]

    def install(self) -> None:
        import torch

        torch.set_default_dtype(self.dtype)
        torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        if self.matmul_precision != torch.get_float32_matmul_precision():
            torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = self.cudnn


def current_torch_settings() -> TorchSettings | None:
    """The settings of this process; `None` where torch is not imported, or has its defaults."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    found = TorchSettings(torch.get_default_dtype(), deterministic, torch.get_float32_matmul_precision(), cudnn)
    is_usual = found == TorchSettings(torch.float32, (False, False), "highest", (False, False))
    return None if is_usual else found


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """The filters of warnings, the strongest first, and NumPy's print options, where it is imported."""

    # action, message, the category's module and name, the module that warns, its line
    filters: tuple[tuple[Any, str, tuple[str, str], str, int], ...]
    numpy: Mapping[str, Any] | None

    def install(self) -> None:
        for action, message, (package, name), module, line in reversed(self.filters):
            # a library that is not imported here has not warned yet
            if (category := getattr(sys.modules.get(package), name, None)) is not None:
                warnings.filterwarnings(action, message, category, module, line)
        if self.numpy is not None:
            import numpy

            # another host's NumPy may know fewer
            known = numpy.get_printoptions()
            numpy.set_printoptions(**{name: value for name, value in self.numpy.items() if name in known})


def current_output_settings() -> OutputSettings:
    """The settings of this process, without functions that format, and categories that the notebook defines."""
    found: list[Any] = [
        item for item in warnings.filters if isinstance(item[2], type) and item[2].__module__ != "__main__"
    ]
    filters = tuple(
        (action, _text(message), (category.__module__, category.__name__), _text(module), line)
        for action, message, category, module, line in found
    )
    numpy = sys.modules.get("numpy")
    options = None if numpy is None else {**numpy.get_printoptions(), "formatter": None}
    return OutputSettings(filters, options)


def _text(pattern: Any) -> str:
    """A filter's regular expression; empty where it takes all."""
    return getattr(pattern, "pattern", pattern) or ""
