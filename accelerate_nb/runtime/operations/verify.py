"""Functions of one's own that all processes call with tensors of the same shapes, checked under ACCELERATE_DEBUG_MODE."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from accelerate_nb.errors import OperationError
from accelerate_nb.runtime.operations.call_check import CollectiveCall, agree
from accelerate_nb.runtime.operations.nested import description
from accelerate_nb.runtime.world.state import PartialState

P = ParamSpec("P")
R = TypeVar("R")


def verify_operation(function: Callable[P, R]) -> Callable[P, R]:
    """
    A decorator: with `PartialState().debug` an `OperationError` on all processes if their tensors differ in shape or type.

    The tensors are the argument `tensor`, or the first one. The operations of this package are always checked.

    >>> @verify_operation
    ... def total(tensor): return tensor.sum()
    """

    @wraps(function)
    def verified(*args: P.args, **kwargs: P.kwargs) -> R:
        state = PartialState()
        if state.debug and state.use_distributed:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            agree(state.world, CollectiveCall(_name(function), description(tensor)))
        return function(*args, **kwargs)

    return verified


def chained_operation(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: an `OperationError` inside names this function too."""

    @wraps(function)
    def chained(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except OperationError as error:
            raise OperationError(f"{_name(function)} could not be done: {error}") from error

    return chained


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
