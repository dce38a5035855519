"""A full copy of the model on every process; gradients are averaged after each backward."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import OutOfMemoryError, Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.dataclasses import DistributedDataParallelKwargs
from accelerate_nb.runtime.compat.env_vars import parse_flag_from_env
from accelerate_nb.runtime.operations.collective import broadcast_object_list
from accelerate_nb.runtime.strategies.base import Strategy, devices_of
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

    def accept(self, model: nn.Module) -> None:
        """Raise a `ConfigurationError` for a model whose weights are on several devices, unless that is allowed."""
        places = devices_of(model)
        if len(places) > 1 and not parse_flag_from_env("ACCELERATE_BYPASS_DEVICE_MAP"):
            raise ConfigurationError(
                "You can't train a model that has been loaded with `device_map='auto'` in any distributed mode: its weights "
                f"lie on {', '.join(sorted(map(str, places)))}. Load it without a device map, or start one process."
            )
        super().accept(model)

    def wrap_model(self, model: nn.Module) -> nn.Module:
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

    def compile(self, model: nn.Module, how: TorchDynamoPlugin) -> nn.Module:
        """The model, compiled; regions are compiled inside of what copies it, which stays the object that it is."""
        if how.use_regional_compilation and isinstance(model, DistributedDataParallel):
            model.module = how.compiled(model.module)
            return model
        return super().compile(model, how)

    def hold_gradients(self, model: nn.Module) -> AbstractContextManager[Any]:
        """`DistributedDataParallel.no_sync`."""
        copies = copies_in(model)
        return nullcontext() if copies is None else copies.no_sync()

    @contextmanager
    def send_gradients(self, model: nn.Module) -> Iterator[None]:
        """Make the coming backward exchange gradients although its forward did not prepare for it."""
        copies = copies_in(model)
        if copies is None:
            yield
            return
        before = copies.require_backward_grad_sync, copies.require_forward_param_sync
        copies.require_backward_grad_sync = copies.require_forward_param_sync = True
        # without outputs, the reducer expects a gradient for every parameter
        copies.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            copies.require_backward_grad_sync, copies.require_forward_param_sync = before

    def bucket_orders(self, models: Sequence[Any], *, is_collective: bool) -> list[list[int]]:
        """The order in which gradients came in the first backward, after which DDP makes its buckets anew."""
        return [
            _bucket_order(copies_in(model), is_main=self.world.is_main, is_collective=is_collective) for model in models
        ]

    def set_bucket_orders(self, models: Sequence[Any], orders: Sequence[Sequence[int]]) -> None:
        """Make the buckets as they were made after a first backward, before there is one: the coming step sums as it would have."""
        shared = [list(orders)]
        broadcast_object_list(shared)
        for model, order in zip(models, shared[0], strict=False):
            if (copies := copies_in(model)) is not None and order:
                _make_buckets(copies, order)

    def join_uneven(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """`torch.distributed.algorithms.Join`: a process without batches joins the others' collectives."""
        return Join([copies_in(joinable) or joinable for joinable in joinables], throw_on_early_termination=False)

    def unshared(self, models: Sequence[Any], learning: Sequence[Tensor]) -> list[str]:
        """Warnings about copies that were never called, and weights that are in none: nobody averages their gradients."""
        known = {id(item) for item in learning}
        replicated = [
            (model, copies)
            for model in models
            if (copies := copies_in(model)) and known & {id(item) for item in copies.parameters()}
        ]
        alone = f"each of the {self.world.size} processes trains a model of its own"
        if not replicated:
            return [
                f"The optimizer's weights are in no prepared model, so {alone}. Give the model to accelerator.prepare(...), too."
            ]
        # inside of what torch compiles, DDP doesn't note its first call; of a model that was prepared twice, one copy is enough
        called = [copies for model, copies in replicated if copies._lazy_init_ran or is_compiled_module(model)]
        rest = known - {id(item) for copies in called for item in copies.parameters()}
        if not rest & {id(item) for _, copies in replicated for item in copies.parameters()}:
            return []
        return [f"The prepared model was not called, so {alone}. Call what prepare returned for it."]

    def _release(self) -> None:
        """Separate the models from the process group before it ends."""
        # a reducer that is the last to hold a gloo group joins its threads while Python waits for it, and such a thread may wait for
        # Python: the process would hang when the model is freed (seen with torch 2.13)
        for model in self._wrapped:
            model.__dict__.update(reducer=None, logger=None)


def _bucket_order(copies: DistributedDataParallel | None, *, is_main: bool, is_collective: bool) -> list[int]:
    if copies is None or getattr(copies, "reducer", None) is None:
        return []
    # after the first backward: what the next forward would do, unless a gradient is still missing, which it raises an error for
    if is_collective:
        with suppress(RuntimeError):
            copies._has_rebuilt_buckets |= copies.reducer._rebuild_buckets()
    if not copies._has_rebuilt_buckets or not is_main:
        return []
    numbers = {id(weight): number for number, weight in enumerate(copies._build_params_for_reducer()[0])}
    try:
        # it is how torch shows which weights are in a bucket, at the cost of zeros for all gradients
        buckets = copies.reducer._get_zeros_like_grad_buckets()
    except OutOfMemoryError:
        return []
    return [numbers[id(weight)] for bucket in buckets for weight in bucket.parameters()]


def _make_buckets(copies: DistributedDataParallel, order: Sequence[int]) -> None:
    """As unpickling does in `DistributedDataParallel.__setstate__`, with weights that are numbered in their order."""
    weights, are_sparse = copies._build_params_for_reducer()
    if sorted(order) != list(range(len(weights))) or copies.mixed_precision is not None:
        return
    weights, are_sparse = [weights[number] for number in order], [are_sparse[number] for number in order]
    names = copies._build_debug_param_to_name_mapping(weights)
    # the memory of the former buckets is released first
    copies.__dict__.update(reducer=None, logger=None)
    copies._ddp_init_helper(weights, are_sparse, names, copies.static_graph)
    if copies.static_graph and copies.logger is not None:
        copies.reducer._set_static_graph()
        copies.logger._set_static_graph()
    for hook, state in copies._comm_hooks:
        dist._register_comm_hook(copies.reducer, state, hook)
    copies.reducer._push_all_rebuilt_params()
    copies._has_rebuilt_buckets = copies.reducer._rebuild_buckets()
