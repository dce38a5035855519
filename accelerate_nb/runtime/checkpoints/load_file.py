"""How a file of a checkpoint is read: as data, never as code."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.addresses import is_apart
from accelerate_nb.runtime.checkpoints.holding import Held

# What torch, pickle and safetensors raise at bytes that they can't make sense of.
_DAMAGE = (
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    OverflowError,
    struct.error,
    pickle.UnpicklingError,
    SafetensorError,
)


def read(path: Path, expected: str, **options: Any) -> Any:
    """
    What `torch.save` wrote to a file; `options` are those of `torch.load`.

    Only tensors and plain values are made of it. `expected` says, for the error of one that can't be read, what it should be.
    """
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist, and {expected} was expected in it. Prepare the same objects as when the checkpoint was "
            "saved, or choose another folder."
        )
    options = {"map_location": "cpu", "weights_only": True, **options}
    with _understood(path, expected), harmless.block():
        return torch.load(path, **options)


def device_of(map_location: str | None, own: torch.device) -> str:
    """Where an optimizer's state is read to, by Accelerate's word for it; `own` is the process's device."""
    if map_location not in (None, "cpu", "on_device"):
        raise ConfigurationError(
            f"Unsupported optimizer map location passed: map_location={map_location!r}. Choose one of `None`, `'cpu'`, or "
            "`'on_device'`."
        )
    # where torch can't read to, the optimizer itself brings its state from the CPU
    return str(own) if map_location == "on_device" and not is_apart(own) else "cpu"


def read_weights(path: Path, expected: str) -> dict[str, Any]:
    """The tensors of a file of safetensors, on the CPU, where they are read when they are used."""
    with _understood(path, expected):
        return load_file(path)


@contextmanager
def fitting(path: Path, expected: str) -> Iterator[None]:
    """A block that gives an object what was read: what doesn't fit it is a `CheckpointError` that names the file."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(
            f"{path} does not fit: it should hold {expected} ({type(error).__name__}: {error}). Prepare the same objects as "
            "when the checkpoint was saved, in the same order."
        ) from error


@contextmanager
def _understood(path: Path, expected: str) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        names = _strangers(path)
        if not names:
            raise CheckpointError(_damaged(path, expected, error)) from error
        raise CheckpointError(
            f"{path} was not read: besides data it asks for {', '.join(names)}, and loading that would run code. If you trust "
            "the file, allow these with `torch.serialization.add_safe_globals([...])`, or everything with "
            "`load_state(..., load_kwargs={'weights_only': False})`."
        ) from error
    except _DAMAGE as error:
        raise CheckpointError(_damaged(path, expected, error)) from error


def _damaged(path: Path, expected: str, error: BaseException) -> str:
    first = str(error).strip().split("\n", maxsplit=1)[0][:200]
    return (
        f"{path} is damaged, or no file of a checkpoint: {expected} was expected in it, and its {path.stat().st_size} bytes "
        f"can't be read as such ({type(error).__name__}: {first}). Load another checkpoint."
    )


def _strangers(path: Path) -> list[str]:
    """The names that a file asks for and that are not known to be harmless, found without reading it."""
    try:
        with harmless.block():
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except _DAMAGE:
        return []


def numpy_state() -> list[Any]:
    """What the state of numpy's generator is made of."""
    core = getattr(np, "_core", None) or np.core  # numpy 1 has it under its old name
    return [core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32)), type(np.dtype(np.int64))]


# torch must be told that these are harmless
harmless = Held(lambda: torch.serialization.safe_globals(numpy_state()))
