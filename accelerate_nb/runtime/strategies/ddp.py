"""A full copy of the model on every process; gradients are averaged after each backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.env_vars import parse_flag_from_env
from accelerate_nb.runtime.compat.kwargs_handlers import DistributedDataParallelKwargs
from accelerate_nb.runtime.strategies.base import Strategy
from accelerate_nb.runtime.strategies.device_placement import devices_of
from accelerate_nb.runtime.training.compile import TorchDynamoPlugin, is_compiled_module
from accelerate_nb.runtime.training.unwrap import copies_in
from accelerate_nb.runtime.world.registry import at_world_exit
from accelerate_nb.runtime.world.world import World


class DDP(Strategy):
    """A full copy of the model on every process; gradients are averaged after each backward."""

    axes = ("dp_replicate", "cp")

    def __init__(self, world: World, options: DistributedDataParallelKwargs | None = None) -> None:
        super().__init__(world)
        self.options = options or DistributedDataParallelKwargs()
        self._wrapped: WeakSet[DistributedDataParallel] = WeakSet()
        at_world_exit(self._release)

    def accept(self, model: Module) -> None:
        """Raise a `ConfigurationError` for a model whose weights are on several devices, unless that is allowed."""
        places = devices_of(model)
        if len(places) > 1 and not parse_flag_from_env("ACCELERATE_BYPASS_DEVICE_MAP"):
            raise ConfigurationError(
                "You can't train a model that has been loaded with `device_map='auto'` in any distributed mode: its weights "
                f"lie on {', '.join(sorted(map(str, places)))}. Load it without a device map, or start one process."
            )
        super().accept(model)

    def wrap_model(self, model: Module) -> Module:
        """The model in `DistributedDataParallel`, unless none of its weights learns."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        elsewhere = self.world.device.type == "cpu" or len(devices_of(model)) > 1
        wrapped = DistributedDataParallel(
            model, device_ids=None if elsewhere else [self.world.device], **self.options.to_kwargs()
        )
        # Attributes are released in the order in which they were set. The release of a group that has been destroyed waits
        # for its threads; if that is the C++ reducer, it holds the interpreter's lock, which one of them may be waiting for.
        wrapped.__dict__["_outlives_the_reducer"] = wrapped.process_group
        self.options.register_comm_hook(wrapped)
        self._wrapped.add(wrapped)
        return wrapped

    def compile(self, model: Module, how: TorchDynamoPlugin) -> Module:
        """The model, compiled; regions are compiled inside of what copies it, which stays the object that it is."""
        if how.use_regional_compilation and isinstance(model, DistributedDataParallel):
            model.module = how.compiled(model.module)
            return model
        return super().compile(model, how)

    def hold_gradients(self, model: Module) -> AbstractContextManager[Any]:
        """`DistributedDataParallel.no_sync`."""
        copies = copies_in(model)
        return nullcontext() if copies is None else copies.no_sync()

    def send_gradients(self, model: Module) -> AbstractContextManager[Any]:
        """Make the coming backward exchange gradients although its forward did not prepare for it."""
        copies = copies_in(model)
        return nullcontext() if copies is None else _sending(copies)

    def join_uneven(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """`torch.distributed.algorithms.Join`: a process without batches joins the others' collectives."""
        return Join([copies_in(joinable) or joinable for joinable in joinables], throw_on_early_termination=False)

    def unshared(self, models: Sequence[Any], learning: Sequence[Tensor]) -> list[str]:
        """Warnings about copies that were never called, and weights that are in none: nobody averages their gradients."""
        known = {id(item) for item in learning}
        replicated = [(model, copies) for model in models if (copies := copies_in(model)) and _has_any(copies, known)]
        alone = f"each of the {self.world.size} processes trains a model of its own"
        if not replicated:
            return [
                f"The optimizer's weights are in no prepared model, so {alone}. Give the model to accelerator.prepare(...), too."
            ]
        # inside of what torch compiles, DDP doesn't note its first call
        called = all(copies._lazy_init_ran or is_compiled_module(model) for model, copies in replicated)
        return [] if called else [f"The prepared model was not called, so {alone}. Call what prepare returned for it."]

    def _release(self) -> None:
        """
        Separate the models from the process group before it ends.

        A reducer that is the last to hold a gloo group joins that group's threads while Python waits for it, and such a
        thread may itself be waiting for Python: the process would hang when the model is freed (seen with torch 2.13).
        """
        for model in self._wrapped:
            model.__dict__.update(reducer=None, logger=None)


def _has_any(model: Module, known: set[int]) -> bool:
    return any(id(parameter) in known for parameter in model.parameters())


@contextmanager
def _sending(model: DistributedDataParallel) -> Iterator[None]:
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    # without outputs, the reducer expects a gradient for every parameter
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before
