"""Functions that free memory."""

import functools
import gc
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from accelerate_nb.errors import OperationError, StateError
from accelerate_nb.rank.attempt_notes import leave_note, notes
from accelerate_nb.runtime.operations.transfer import CollectiveCall, agree
from accelerate_nb.runtime.world.registry import current_world, is_joined
from accelerate_nb.runtime.xla.device import wait as wait_for_device

_NOTE = "batch too large"
_OUT_OF_MEMORY = (
    " out of memory.",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
    # XLA's: when a program is compiled that needs more memory than a TPU has, when one is run, and on its CPU backend
    "RESOURCE_EXHAUSTED",
    "Ran out of memory in memory space",
    "Out of memory allocating",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the device's unused memory back to it."""
    if garbage_collection:
        gc.collect()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.get_device_module(accelerator).empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """As many `None` as there are objects, to replace them, after the unused memory was freed."""
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether an error means that memory was too small."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    return (
        isinstance(exception, RuntimeError)
        and len(exception.args) == 1
        and any(text in str(exception.args[0]) for text in _OUT_OF_MEMORY)
    )


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """
    A decorator: the function is called with a batch size as its first argument, with a smaller one if memory was too small.

    All processes call it, equally often: a call waits until it is known whether memory was enough on each of them. All take the
    smaller size when one of them must, also those that wait for it in an operation of this package; one that waits in another
    collective (a backward of DDP) does so until that times out. Each call begins again with `starting_batch_size`; after a
    restart of the run, with the first size that was not too large before.

    >>> @find_executable_batch_size(starting_batch_size=64)
    ... def train(batch_size): return batch_size
    >>> train()
    64
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    wanted = len(inspect.signature(function).parameters)

    @functools.wraps(function)
    def with_a_size_that_fits(*args: Any, **kwargs: Any) -> Any:
        if wanted < len(args) + 1:
            raise TypeError(
                f"{function.__name__} was called with {args!r}, but its first argument, the batch size, is filled in by "
                "find_executable_batch_size. Leave it out."
            )
        # in former attempts of the run
        too_large = [note["size"] for note in notes(_NOTE, former=True) if note["function"] == _name_of(function)]
        size, limit = starting_batch_size, min(too_large, default=math.inf)
        while size > 0:
            if size < limit:
                fitted, result = _try_batch_size(function, size, args, kwargs)
                if fitted:
                    return result
            size = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise StateError("No executable batch size found, reached zero.")

    return with_a_size_that_fits


def _name_of(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(type(function)))}"


def _try_batch_size(function: Callable[..., Any], size: int, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Whether the function ran in memory on every process, and what it returned."""
    clear_device_cache(garbage_collection=True)
    try:
        result = function(size, *args, **kwargs)
        wait_for_device()  # its memory is taken when the pending work is computed
    except OperationError as error:
        if str(_TOO_LARGE) not in error.calls:
            raise
        return False, None  # another process gave up while this one waited for it
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        # at once: the others may wait elsewhere for this process until all of them are started again
        leave_note(_NOTE, function=_name_of(function), size=size)
        return _everywhere(_TOO_LARGE), None
    return _everywhere(_FITS), result


_FITS = CollectiveCall("find_executable_batch_size", "memory was enough")
_TOO_LARGE = CollectiveCall("find_executable_batch_size", "memory was too small")


def _everywhere(found: CollectiveCall) -> bool:
    """Whether all processes found that memory was enough."""
    if is_joined() and current_world().size > 1:
        try:
            agree(current_world(), found)
        except OperationError as error:
            if str(_TOO_LARGE) not in error.calls:
                raise
            return False
    return found is _FITS
