"""A small shim that makes "the current CUDA device" the CPU, so that megatron-core computes without a GPU, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.ranks import run_on_ranks

CPU = torch.device("cpu")
LIMIT = 100.0


class NoStream:
    """A stream, an event, or a device as a context: nothing is asynchronous on a CPU."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...


class Generators:
    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator


class CudaToCpu(TorchFunctionMode):
    """Tensors that are made on "cuda" are made on the CPU, and name their type as if they were not."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(value, str) and value.startswith("cuda") else value for value in args)
        return function(*args, **kwargs)


def doing_nothing() -> Any:
    # a function of its own for each name: dynamo refuses one that has two
    return lambda *_, **__: None


def pretend_cuda() -> None:
    """Have this process compute on the CPU whatever asks for the current CUDA device."""
    cuda: Any = torch.cuda
    if cuda.device_count is no_count:
        return
    cuda.device_count = no_count
    cuda.current_device = lambda: CPU
    cuda.is_available = lambda: False
    cuda.is_current_stream_capturing = lambda: False
    cuda.memory_allocated, cuda.max_memory_allocated = lambda *_: 0, lambda *_: 0
    for name in ("synchronize", "set_device", "empty_cache", "manual_seed", "manual_seed_all", "_lazy_init"):
        setattr(cuda, name, doing_nothing())
    for name in ("stream", "current_stream", "default_stream", "device"):
        setattr(cuda, name, lambda *_, **__: NoStream())
    cuda.Stream = cuda.Event = NoStream
    cuda._lazy_call = lambda function, **_: function()
    cuda.default_generators = Generators()
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = doing_nothing(), doing_nothing()
    for name in ("Float", "Long", "Half", "BFloat16", "Byte", "Int"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    CudaToCpu().__enter__()


def no_count() -> int:
    return 1


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What `function(*args)` returns on each of so many processes that compute on CPUs what asks for the current CUDA device."""
    return run_on_ranks(_pretending, world_size, function, *args, limit=LIMIT)


def _pretending(function: Callable[..., Any], *args: Any) -> Any:
    pretend_cuda()
    return function(*args)
