"""The steps of loops on Hugging Face's own Accelerate, such as those of `transformers.Trainer` and trl, measured as those on this package's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn import Module

from accelerate_nb.rank.event_sink import outlet
from accelerate_nb.runtime.observability.memory_use import MemoryReporter
from accelerate_nb.runtime.observability.phase_timer import PhaseTimer
from accelerate_nb.runtime.observability.step_metrics import StepMetrics

# What measures the steps of an accelerator, and of the optimizers and loaders that it has prepared.
_metrics: WeakKeyDictionary[Any, StepMetrics] = WeakKeyDictionary()
_wrapped: set[type] = set()
_Method = Callable[..., Any]


def measure_steps(accelerator: Any) -> None:
    """Measure the steps of an `accelerate.Accelerator` from its first `prepare` on, where somebody listens."""
    device, size = accelerator.device, accelerator.num_processes
    if outlet() is None or device.type == "xla":
        return
    _wrap(type(accelerator))
    parallelism = getattr(accelerator, "parallelism_config", None)
    rank, share = accelerator.process_index, 1 / getattr(parallelism, "non_data_parallel_size", 1)
    _metrics[accelerator] = StepMetrics(rank, device, share, PhaseTimer(rank, device, size))


def _wrap(kind: type) -> None:
    """Have the methods of one of Hugging Face's classes tell when a part of a step begins and ends; once in a process."""
    for owner in kind.__mro__:
        if owner in _wrapped or not owner.__module__.startswith("accelerate."):
            continue
        _wrapped.add(owner)
        for name in _WRAPPERS.keys() & vars(owner).keys():
            setattr(owner, name, _WRAPPERS[name](getattr(owner, name)))


def _prepares(original: _Method) -> _Method:
    @functools.wraps(original)
    def prepare(self: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, item, *args, **kwargs)
        if (metrics := _metrics.get(self)) is None or made in _metrics:
            return made
        if isinstance(made, Module):
            metrics.phases.watch(made)
        else:
            _metrics[made] = metrics
            metrics.memory = MemoryReporter(self._models, self._optimizers, self.device)
            _wrap(type(made))
        return made

    return prepare


def _steps(original: _Method) -> _Method:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        metrics = _metrics.get(self)
        if metrics is None or not self.gradient_state.sync_gradients:
            return original(self, *args, **kwargs)
        metrics.phases.begin("optimizer")
        made = original(self, *args, **kwargs)
        if metrics.steps == 0 and metrics.memory is not None:
            metrics.memory.first_step()
        metrics.stepped(self)
        return made

    return step


def _reads(original: _Method) -> _Method:
    @functools.wraps(original)
    def batches(self: Any) -> Iterator[Any]:
        metrics = _metrics.get(self)
        if metrics is None:
            return original(self)  # type: ignore[no-any-return]  # a generator
        position = _LoaderPosition(self)
        return metrics.through(position, position.counted(original(self)))

    return batches


def _goes_backward(original: _Method) -> _Method:
    @functools.wraps(original)
    def backward(self: Any, loss: Any, **kwargs: Any) -> Any:
        metrics = _metrics.get(self)
        if metrics is None:
            return original(self, loss, **kwargs)
        with metrics.phases.backward(loss):
            return original(self, loss, **kwargs)

    return backward


def _clips(original: _Method) -> _Method:
    @functools.wraps(original)
    def clip_grad_norm_(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = original(self, *args, **kwargs)
        if (metrics := _metrics.get(self)) is not None:
            metrics.clipped(norm)
        return norm

    return clip_grad_norm_


_WRAPPERS: dict[str, Callable[[_Method], _Method]] = {
    "backward": _goes_backward,
    "clip_grad_norm_": _clips,
    "prepare_model": _prepares,
    "prepare_optimizer": _prepares,
    "prepare_data_loader": _prepares,
    # of optimizers, and of loaders
    "step": _steps,
    "__iter__": _reads,
}


class _LoaderPosition:
    """How far one of Hugging Face's loaders has been read, by the names that this package's loaders have for it."""

    more_axes = ()

    def __init__(self, loader: Any) -> None:
        self.num_workers = getattr(loader, "num_workers", None)
        self.iteration = loader.iteration
        self.batches_read = 0
        try:
            self.batches_left: int | None = len(loader)
        except TypeError:
            self.batches_left = None

    def counted(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        for batch in batches:
            self.batches_read += 1
            yield batch
