"""The steps of loops on Hugging Face's own Accelerate, such as those of `transformers.Trainer` and trl, measured as those on this package's."""

import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch.nn import Module

from accelerate_nb.rank.event_sink import outlet
from accelerate_nb.runtime.observability.phase_timer import PhaseTimer
from accelerate_nb.runtime.observability.step_metrics import MemoryReporter, StepMetrics

_Method: TypeAlias = Callable[..., Any]


class AccelerateSteps:
    """Measures the steps of every `accelerate.Accelerator` of this process that it is given, from the first `prepare` on."""

    def __init__(self) -> None:
        # what measures an accelerator, and the optimizers and loaders that it has prepared
        self._metrics: WeakKeyDictionary[Any, StepMetrics] = WeakKeyDictionary()
        self._wrapped: set[type] = set()
        # how each method is called where its accelerator, optimizer or loader is measured
        self._measured: dict[str, Callable[..., Any]] = {
            "backward": self._go_backward,
            "clip_grad_norm_": self._clip,
            "prepare_model": self._prepare,
            "prepare_optimizer": self._prepare,
            "prepare_data_loader": self._prepare,
            # of optimizers, and of loaders
            "step": self._step,
            "__iter__": self._read,
        }

    def measure(self, accelerator: Any) -> None:
        """Send the metrics and the parts of its steps, where somebody listens."""
        device, size = accelerator.device, accelerator.num_processes
        if outlet() is None or device.type == "xla":
            return
        self._wrap(type(accelerator))
        parallelism = getattr(accelerator, "parallelism_config", None)
        rank, share = accelerator.process_index, 1 / getattr(parallelism, "non_data_parallel_size", 1)
        self._metrics[accelerator] = StepMetrics(rank, device, share, PhaseTimer(rank, device, size))

    def _wrap(self, kind: type) -> None:
        """Have the methods of one of Hugging Face's classes tell when a part of a step begins and ends; once in a process."""
        for owner in kind.__mro__:
            if owner in self._wrapped or not owner.__module__.startswith("accelerate."):
                continue
            self._wrapped.add(owner)
            for name in self._measured.keys() & vars(owner).keys():
                setattr(owner, name, self._wrapper(getattr(owner, name), self._measured[name]))

    def _wrapper(self, original: _Method, measured: _Method) -> _Method:
        @functools.wraps(original)
        def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if (metrics := self._metrics.get(owner)) is None:
                return original(owner, *args, **kwargs)
            return measured(metrics, original, owner, *args, **kwargs)

        return call

    def _prepare(self, metrics: StepMetrics, original: _Method, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(accelerator, *args, **kwargs)
        if made in self._metrics:
            return made
        if isinstance(made, Module):
            metrics.phases.watch(made)
        else:
            self._metrics[made] = metrics
            metrics.memory = MemoryReporter(accelerator._models, accelerator._optimizers, accelerator.device)
            self._wrap(type(made))
        return made

    @staticmethod
    def _go_backward(metrics: StepMetrics, original: _Method, accelerator: Any, loss: Any, **kwargs: Any) -> Any:
        with metrics.phases.backward(loss):
            return original(accelerator, loss, **kwargs)

    @staticmethod
    def _clip(metrics: StepMetrics, original: _Method, *args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        metrics.clipped(norm)
        return norm

    @staticmethod
    def _step(metrics: StepMetrics, original: _Method, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not optimizer.gradient_state.sync_gradients:
            return original(optimizer, *args, **kwargs)
        metrics.phases.begin("optimizer")
        made = original(optimizer, *args, **kwargs)
        if metrics.steps == 0 and metrics.memory is not None:
            metrics.memory.first_step()
        metrics.stepped(optimizer)
        return made

    @staticmethod
    def _read(metrics: StepMetrics, original: _Method, loader: Any) -> Iterator[Any]:
        position = _LoaderPosition(loader)
        return metrics.through(position, position.counted(original(loader)))


class _LoaderPosition:
    """How far one of Hugging Face's loaders has been read, by the names that this package's loaders have for it."""

    more_axes = ()

    def __init__(self, loader: Any) -> None:
        self.num_workers = getattr(loader, "num_workers", None)
        self.iteration = loader.iteration
        self.batches_read = 0
        try:
            self._length: int | None = len(loader)
        except TypeError:
            self._length = None

    @property
    def batches_left(self) -> int | None:
        return None if self._length is None else self._length - self.batches_read

    def counted(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        for batch in batches:
            self.batches_read += 1
            yield batch
