"""`Accelerator.prepare`: models, optimizers, loaders and schedules, ready for a run."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.accelerator.step import StepMethods
from accelerate_nb.runtime.compat.dataclasses import RNGType
from accelerate_nb.runtime.data.prepare import prepare_data_loader
from accelerate_nb.runtime.data.prepared_loader import cut_for_group, skip_first_batches
from accelerate_nb.runtime.observability.phase_timer import unwatch
from accelerate_nb.runtime.observability.step_metrics import MemoryReporter
from accelerate_nb.runtime.operations.collective import broadcast_object_list
from accelerate_nb.runtime.strategies.base import PrepareCall, PrepareRequest, refuse_placeholder
from accelerate_nb.runtime.training.compile import TorchDynamoPlugin
from accelerate_nb.runtime.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler, innermost
from accelerate_nb.runtime.training.prepared import add, is_prepared
from accelerate_nb.runtime.training.unwrap import extract_model_from_parallel
from accelerate_nb.runtime.world.registry import Generation
from accelerate_nb.user_warnings import warn_user


class PrepareMethods(StepMethods):
    """The methods of an `Accelerator` that prepare objects, and take them back."""

    compiling: TorchDynamoPlugin
    device_placement: bool
    rng_types: list[str | RNGType]
    step_scheduler_with_optimizer: bool
    _generation: Generation
    _shows_epochs: bool

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """
        The objects, ready for this run, in the order in which they were given.

        Models, optimizers, loaders and learning-rate schedules in any order and number; anything else comes back as it is,
        and so does what was prepared before.

        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
        """
        placements = [None] * len(args) if device_placement is None else device_placement
        if len(placements) != len(args):
            raise ConfigurationError(
                f"device_placement holds {len(placements)} values for {len(args)} objects. Give one for each."
            )
        mesh = self.world.mesh
        self.strategy.begin_call(
            PrepareCall(tuple(args), self.split_batches, self.world.size, mesh.degrees.get("sp", 1), self)
        )
        prepared = self._prepare_together(args, placements)
        # a schedule's optimizer is searched among those that are prepared by now
        prepared = [
            self._prepare_alone(item, placed, is_cut=any(isinstance(given, Module) for given in args))
            for item, placed in zip(prepared, placements, strict=True)
        ]
        return tuple(prepared) if len(prepared) != 1 else prepared[0]

    @property
    def _optimizer_types(self) -> tuple[type, ...]:
        return (Optimizer, *self.strategy.placeholder_types)

    def _prepare_together(
        self, objects: Sequence[Any], placements: Sequence[bool | None], *, is_trained: bool = True
    ) -> list[Any]:
        """The models and optimizers of a call as the strategy prepares them; the rest as it is."""
        requests = {
            index: PrepareRequest(_original(item), self.compiling, self._places(placed), is_trained)
            for index, (item, placed) in enumerate(zip(objects, placements, strict=True))
            if isinstance(item, (Module, *self._optimizer_types)) and not is_prepared(item, self._prepared_for)
        }
        made = dict(zip(requests, self.strategy.prepare(list(requests.values())), strict=True))
        prepared: list[Any] = []
        for index, item in enumerate(objects):
            new = made.get(index)
            if isinstance(item, Module):
                if isinstance(new, Module) and self.step_metrics is not None:
                    self.step_metrics.phases.watch(new)
                prepared.append(add(self.bundle.models, item if new is None else new, self._prepared_for))
            elif isinstance(item, self._optimizer_types):
                stepping = item if new is None else self._stepping(new, placements[index])
                if isinstance(stepping, AcceleratedOptimizer):
                    stepping.use_strategy(self.strategy)  # another `Accelerator` may have prepared it
                prepared.append(add(self.bundle.optimizers, stepping, self._prepared_for))
            else:
                prepared.append(item)
        return prepared

    def _stepping(self, optimizer: Optimizer, placed: bool | None) -> AcceleratedOptimizer:
        memory = MemoryReporter(self.bundle.models, self.bundle.optimizers, self.device)
        if self.step_metrics is not None:
            self.step_metrics.memory = memory
        wrapper: type[AcceleratedOptimizer] = self.strategy.optimizer_class or AcceleratedOptimizer
        return wrapper(
            optimizer,
            self._places(placed),
            self.scaler,
            device=self.device,
            before_first_step=partial(_check_gradients, self),
            after_first_step=memory.first_step,
            before_step=None if self.step_metrics is None else partial(self.step_metrics.phases.begin, "optimizer"),
            after_step=None if self.step_metrics is None else self.step_metrics.stepped,
            strategy=self.strategy,
        )

    def _prepare_alone(self, item: Any, placed: bool | None, *, is_cut: bool) -> Any:
        item = item if is_prepared(item) else self.strategy.replace(item)
        if isinstance(item, DataLoader):
            prepared = self._prepare_loader(item, placed, is_cut=is_cut)
            # one that was prepared before its model
            parts = self.world.mesh.sp if is_cut else 1
            return cut_for_group(prepared, self.strategy.batch_cutter, parts, self.device)
        if isinstance(item, (LRScheduler, AcceleratedScheduler, *self.strategy.schedule_types)):
            return self.prepare_scheduler(item)
        refuse_placeholder(item)
        return item

    def prepare_model(self, model: Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """The model on its device, computing in the chosen precision, and, unless it is only evaluated, spread as the run is."""
        return self._prepare_together([model], [device_placement], is_trained=not evaluation_mode)[0]

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """The optimizer, stepping when gradients are synchronised."""
        return self._prepare_together([optimizer], [device_placement])[0]

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """The schedule, moving when its optimizer steps."""
        if is_prepared(scheduler, self._prepared_for):
            return add(self.bundle.schedulers, scheduler, self._prepared_for)
        scheduler = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
        moved = self.strategy.wrap_schedule(scheduler, self.bundle.optimizers)
        if moved is not None:
            return add(self.bundle.schedulers, moved, self._prepared_for)
        inner = innermost(getattr(scheduler, "optimizer", None))
        wrapping = [optimizer for optimizer in self.bundle.optimizers if inner is optimizer.optimizer]
        prepared = AcceleratedScheduler(
            scheduler,
            wrapping or self.bundle.optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
            replicas=self.strategy.data_replicas[1],
        )
        return add(self.bundle.schedulers, prepared, self._prepared_for)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """The loader, giving this process its part of each epoch; whole sequences also where DeepSpeed splits them (`sp_size`)."""
        return self._prepare_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def _prepare_loader(
        self,
        data_loader: Any,
        device_placement: bool | None,
        slice_fn_for_dispatch: Any = None,
        *,
        is_cut: bool = False,
    ) -> Any:
        """The loader; `is_cut` is whether its batches come with a model that gets parts of them, where sequences are split."""
        former = data_loader
        if getattr(former, "unprepared", None) is not None and not is_prepared(former, self._generation):
            data_loader = former.unprepared
        elif is_prepared(former):
            return add(self.bundle.loaders, former, self._generation)
        more_axes = () if is_cut or self.world.mesh.sp == 1 else ("sp",)
        rank, replicas = self.world.mesh.data_replica(self.world.rank, *more_axes)
        data_seed = self.dataloader_config.data_seed
        if self.use_seedable_sampler and data_seed is None:
            # ranks may have begun with other seeds, as with set_seed(..., device_specific=True)
            (data_seed,) = broadcast_object_list([torch.initial_seed()])
        prepared: Any = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=replicas,
            process_index=rank,
            split_batches=self.split_batches,
            put_on_device=self._places(device_placement),
            rng_types=list(self.rng_types),
            dispatch_batches=self.dispatch_batches,
            even_batches=self.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        prepared.is_shared = self.world.size > 1
        prepared.between = self.strategy.between_batches
        prepared.send = self.strategy.sender
        prepared.more_axes = more_axes
        prepared.cut = None if more_axes else self.strategy.batch_cutter
        prepared.step_metrics = self.step_metrics
        prepared.bar = len(self.bundle.loaders) if self._shows_epochs else None
        prepared.unprepared = data_loader
        if former is not data_loader:
            prepared.resume(former.position())
            prepared.skip_batches = former.skip_batches * former.stride // prepared.stride
        return add(self.bundle.loaders, prepared, self._generation)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The prepared loader without its first batches."""
        return skip_first_batches(dataloader, num_batches=num_batches)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model as it was before `prepare`."""
        found = self.strategy.unwrap(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)
        unwatch(found)
        return found

    @property
    def _prepared_for(self) -> tuple[Generation, str]:
        """The key of what a model is prepared for; in another world, or in another precision, it is prepared again."""
        return self._generation, self.precision.name

    def _places(self, requested: bool | None) -> bool:
        return self.device_placement if requested is None else requested


def _original(item: Any) -> Any:
    """A model or an optimizer that is prepared anew, as it was before."""
    if isinstance(item, Optimizer):
        return innermost(item)
    return extract_model_from_parallel(item) if is_prepared(item) else item


def _check_gradients(training: PrepareMethods, optimizer: Any) -> None:
    """Warn of what is wrong with the gradients that an optimizer is going to use."""
    learning = [item for group in optimizer.param_groups for item in group["params"] if item.grad is not None]
    if not learning:
        return
    steps = training.gradient_accumulation_steps
    if steps > 1 and not training.has_gone_backward:
        warn_user(
            f"The gradients of {steps} micro-steps are added up by loss.backward(), so they are {steps} times as large as for "
            "one batch. Call accelerator.backward(loss), which divides the loss."
        )
    for text in training.strategy.unshared(training.bundle.models, learning):
        warn_user(text)
