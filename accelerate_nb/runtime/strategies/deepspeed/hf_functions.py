"""Accelerate's functions for a run that uses DeepSpeed, or may."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.enums import DistributedType
from accelerate_nb.runtime.world.state import AcceleratorState, is_initialized

F = TypeVar("F", bound=Callable[..., Any])


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The plugin in force; `ConfigurationError` where the state is not one of DeepSpeed's."""
    if state.distributed_type != DistributedType.DEEPSPEED:
        raise ConfigurationError(
            "The active DeepSpeed plugin was requested, but this run doesn't use DeepSpeed. "
            "Read it only where the state's distributed_type is DEEPSPEED."
        )
    return state.deepspeed_plugin


def deepspeed_required(func: F) -> F:
    """A decorator: the function raises `ConfigurationError` where an `Accelerator` was made without DeepSpeed."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if is_initialized() and AcceleratorState().distributed_type != DistributedType.DEEPSPEED:
            raise ConfigurationError(
                f"{func.__name__} needs DeepSpeed, and the Accelerator of this process was made without it. "
                "Call it only in a run that uses DeepSpeed."
            )
        return func(*args, **kwargs)

    return cast("F", checked)
