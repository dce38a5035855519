"""The reader of a checkpoint's files: as data, never as code."""

import pickle
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.checkpoints import file_names
from accelerate_nb.runtime.checkpoints.host_copy import is_apart, memory_range
from accelerate_nb.runtime.training.repoint import original_name

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
    """The content of a file that `torch.save` wrote: only tensors and plain values, unless the options of `torch.load` say otherwise."""
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist, and {expected} was expected in it. Prepare the same objects as when the checkpoint was "
            "saved, or choose another folder."
        )
    options = {"map_location": "cpu", "weights_only": True, **options}
    with _understood(path, expected), harmless():
        return torch.load(path, **options)


def device_of(map_location: str | None, process_device: torch.device) -> str:
    """The device that an optimizer's state is read to, in Accelerate's terms."""
    if map_location not in (None, "cpu", "on_device"):
        raise ConfigurationError(
            f"Unsupported optimizer map location passed: map_location={map_location!r}. Choose one of `None`, `'cpu'`, or "
            "`'on_device'`."
        )
    # where torch can't read to, the optimizer itself brings its state from the CPU
    return str(process_device) if map_location == "on_device" and not is_apart(process_device) else "cpu"


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """The content of a file, and the function that receives it once every file of a checkpoint could be read."""

    path: Path
    expected: str
    content: Any
    receive: Callable[[Any], Any]

    def give(self) -> Any:
        """Pass it on, and return what the function does; what doesn't fit is an error that names the file."""
        try:
            return self.receive(self.content)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path} does not fit: it should hold {self.expected} ({type(error).__name__}: {error}). Prepare the same "
                "objects as when the checkpoint was saved, in the same order."
            ) from error


def loaded_into(item: Any, path: Path, expected: str, options: Mapping[str, Any]) -> LoadedFile:
    """A file's content for an object's `load_state_dict`."""
    return LoadedFile(path, expected, read(path, expected, **options), item.load_state_dict)


def read_states(folder: Path, stem: str, objects: Sequence[Any], options: Mapping[str, Any]) -> list[LoadedFile]:
    """The states of objects in a checkpoint's files of one kind, which `files_of` made."""
    return [
        loaded_into(item, folder / file_names.numbered(stem, index), f"the state of {stem} {index}", options)
        for index, item in enumerate(objects)
    ]


def load_weights(folder: Path, index: int) -> tuple[Path, dict[str, Any]]:
    """The weights of a checkpoint's model number `index` with the file they come from, whichever of the two kinds it is."""
    expected = f"the weights of model {index}"
    safe = folder / file_names.weights(index, safe=True)
    if safe.exists():
        with _understood(safe, expected):
            return safe, load_file(safe)  # on the CPU, where they are read when they are used
    pickled = folder / file_names.weights(index, safe=False)
    if not pickled.exists():
        raise CheckpointError(
            f"{folder} holds no weights for model {index}: neither {safe.name} nor {pickled.name}. "
            "Prepare the same models as when it was saved."
        )
    return pickled, read(pickled, expected)


def with_aliases(loaded: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """The loaded weights for a model with this `state`: names fitted to it, tied weights under all their names."""
    # data parallel models save their weights as `module.…`, compiled parts as `_orig_mod.…`; the model inside knows neither
    prefix = "module."
    is_inside = all(name.startswith(prefix) for name in loaded) and not all(name.startswith(prefix) for name in state)
    inner = {name.removeprefix(prefix) if is_inside else name: tensor for name, tensor in loaded.items()}
    fitted = {original_name(name): tensor for name, tensor in inner.items()}
    first = {
        memory_range(tensor): name for name, tensor in state.items() if name in fitted and isinstance(tensor, Tensor)
    }
    for name, tensor in state.items():
        if name not in fitted and isinstance(tensor, Tensor) and memory_range(tensor) in first:
            fitted[name] = fitted[first[memory_range(tensor)]]
    return fitted


@contextmanager
def _understood(path: Path, expected: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        names: list[str] = []
        if isinstance(error, pickle.UnpicklingError):
            with suppress(*_DAMAGE), harmless():
                names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))  # finds them without reading
        if names:
            raise CheckpointError(
                f"{path} was not read: besides data it refers to {', '.join(names)}, and loading that would run code. If you "
                "trust the file, allow these with `torch.serialization.add_safe_globals([...])`, or everything with "
                "`load_state(..., load_kwargs={'weights_only': False})`."
            ) from error
        first = str(error).strip().split("\n", maxsplit=1)[0][:200]
        raise CheckpointError(
            f"{path} is damaged, or no file of a checkpoint: {expected} was expected in it, and its {path.stat().st_size} bytes "
            f"can't be read as such ({type(error).__name__}: {first}). Load another checkpoint."
        ) from error


def numpy_state() -> list[Any]:
    """The types in the state of numpy's generator."""
    core = getattr(np, "_core", None) or np.core  # numpy 1 has it under its old name
    return [core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32)), type(np.dtype(np.int64))]


def shared_setting(setting: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[None]]:
    """A setting for blocks of several threads: the first that begins sets it, and the last that ends takes it back."""
    lock, entered, blocks = threading.Lock(), ExitStack(), 0

    @contextmanager
    def block() -> Iterator[None]:
        nonlocal blocks
        with lock:
            if not blocks:
                entered.enter_context(setting())
            blocks += 1
        try:
            yield
        finally:
            with lock:
                blocks -= 1
                if not blocks:
                    entered.close()

    return block


# torch has to know that these are harmless
harmless = shared_setting(lambda: torch.serialization.safe_globals(numpy_state()))
