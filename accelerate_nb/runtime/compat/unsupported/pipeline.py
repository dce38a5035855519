"""Pipelines, in which each process has some of a model's layers: their functions' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import Module

from accelerate_nb.runtime.compat.unsupported.base import Unsupported

_unsupported = Unsupported(
    "a pipeline of processes", "Use `torch.distributed.pipelining` itself, or one device map for all layers."
)


def prepare_pippy(
    model: Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> Any: ...
def generate_device_map(
    model: Module,
    num_processes: int = 1,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[Any, Any] | None = None,
) -> Any: ...
def build_pipeline(
    model: Module, split_points: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], num_chunks: int
) -> Any: ...
def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> Any: ...
def pippy_forward(
    forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any
) -> Any: ...


_unsupported.all_of(globals())
