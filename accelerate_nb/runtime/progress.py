"""A progress bar that one process of each machine shows."""

from __future__ import annotations

from typing import Any

from tqdm import auto

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.process import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, shown by the first process of each machine only, unless `main_process_only=False`."""
    if args and isinstance(args[0], bool):
        raise ConfigurationError(
            f"tqdm({args[0]}, ...) was called, but the first argument is what to go through. "
            f"Write main_process_only={args[0]} instead."
        )
    hidden = kwargs.pop("disable", False) or (main_process_only and not PartialState().is_local_main_process)
    bar: Any = auto.tqdm  # a person's own arguments pass through
    return bar(*args, disable=hidden, **kwargs)
