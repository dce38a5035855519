"""Accelerate's own parts of a pipeline for inference, which `prepare_pippy` does without here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import Module

from accelerate_nb.runtime.compat.unsupported.base import Unsupported

_unsupported = Unsupported("a traced pipeline", "Use `prepare_pippy`, which splits a model without tracing it.")


def build_pipeline(
    model: Module, split_points: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], num_chunks: int
) -> Any: ...
def pippy_forward(
    forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any
) -> Any: ...


_unsupported.all_of(globals())
