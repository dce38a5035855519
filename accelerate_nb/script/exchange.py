"""Values that an exported script's processes give each other, as `%accelerate push`, `pull` and `run` do in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate_nb.errors import ConfigurationError, OperationError
from accelerate_nb.script.rng_streams import drawn_on_ranks, session_begins


def push(*values: Any) -> Any:
    """
    The main process's values, on every process; all processes must call it.

    One value comes back as itself, several as a tuple. Values can be whatever can be pickled; tensors keep their shapes and
    types, and arrive on the device of each process.

    >>> images, labels = push(images, labels)
    """
    session_begins()
    value = values if len(values) != 1 else values[0]
    if _size() == 1:
        return value
    received = _sent(0, lambda: value, detached=False)
    return value if _rank() == 0 else received


def pull(*values: Any, rank: int | None = None, every: bool = False) -> Any:
    """
    The values of one rank, by default the first, on every process; all processes must call it.

    One value comes back as itself, several as a tuple; with `every` each is the list of all ranks' values, in their order.
    Tensors come to the CPU, without what autograd knows of them.

    >>> weights = pull(weights)
    """
    if not every:
        return pull_from(rank or 0, lambda: values if len(values) != 1 else values[0])
    if rank is not None:
        raise ConfigurationError(f"pull was given both every rank and rank {rank}. Leave one of them out.")
    columns = [_of_every_rank(value) for value in values]
    return columns[0] if len(columns) == 1 else tuple(columns)


def pull_from(rank: int, value: Callable[[], Any]) -> Any:
    """
    The value of an expression on one rank, sent to every process; all must call it.

    >>> score = pull_from(0, lambda: score)
    """
    size = _size()
    if not 0 <= rank < size:
        raise ConfigurationError(
            f"The value of rank {rank} was requested, but there are {size} processes. Choose from 0 to {size - 1}."
        )
    return _sent(rank, value, detached=True)


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """
    The first rank's result of a function, after all have called it, each with its own copy of the first's arguments.

    It draws the ranks' random numbers.

    >>> result = run(train, config, rate=0.1)
    """
    # each process has a copy, the main one too: what the function does to its arguments is not seen where they came from
    args, kwargs = _sent(0, lambda: (args, kwargs), detached=False)
    with drawn_on_ranks():
        result = function(*args, **kwargs)
    return pull(result)


def _of_every_rank(value: Any) -> list[Any]:
    return [pull_from(rank, lambda: value) for rank in range(_size())]


def _size() -> int:
    from accelerate_nb.runtime.world.registry import current_world

    return current_world().size


def _rank() -> int:
    from accelerate_nb.runtime.world.registry import current_world

    return current_world().rank


def _sent(rank: int, value: Callable[[], Any], *, detached: bool) -> Any:
    """A copy of one rank's value, on every process; what goes wrong with it is raised on all of them."""
    import torch

    from accelerate_nb.runtime.operations.collective import broadcast, broadcast_object_list
    from accelerate_nb.runtime.world.registry import current_world
    from accelerate_nb.script.serializer import pack, unpack

    world = current_world()
    packed, error = b"", None
    if world.rank == rank:
        try:
            packed = pack(value(), detached=detached)
        except Exception as raised:  # noqa: BLE001 - a pickler calls the user's code, and the others wait for this rank
            error = raised
    error_text = None if error is None else f"{type(error).__name__}: {error}"
    length, error_text = broadcast_object_list([len(packed), error_text], from_process=rank)
    if error is not None:
        raise error
    if error_text is not None:
        raise OperationError(f"Rank {rank} was to send a value, but could not: {error_text}. The same is raised there.")
    if world.size > 1:
        row = (
            torch.frombuffer(bytearray(packed), dtype=torch.uint8) if packed else torch.empty(length, dtype=torch.uint8)
        )
        packed = broadcast(row, from_process=rank).cpu().numpy().tobytes()
    return unpack(packed, torch.device("cpu") if detached else world.device)
