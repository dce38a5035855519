"""The objects of one call of `prepare` of which an engine is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate_nb.errors import ConfigurationError, NotYetError
from accelerate_nb.runtime.compat.enums import DynamoBackend
from accelerate_nb.runtime.strategies.megatron.conversion.convert import complete_weights
from accelerate_nb.runtime.strategies.megatron.engine.architectures import architecture
from accelerate_nb.runtime.strategies.megatron.engine.arguments import get_args, initialize
from accelerate_nb.runtime.strategies.megatron.engine.datasets import MegatronLMDummyDataLoader
from accelerate_nb.runtime.strategies.megatron.engine.engine import MegatronEngine
from accelerate_nb.runtime.strategies.megatron.engine.preparation import (
    first_batch,
    prepare_data_loader,
    prepare_model_optimizer_scheduler,
    with_all_parts,
)
from accelerate_nb.runtime.strategies.megatron.engine.wrappers import (
    MegatronLMDummyScheduler,
    MegatronLMSchedulerWrapper,
)
from accelerate_nb.runtime.strategies.megatron.unused_settings import refuse_unused_by_engine
from accelerate_nb.runtime.strategies.prepare_request import PrepareCall, PrepareRequest
from accelerate_nb.runtime.training.accumulation import GradientState
from accelerate_nb.user_warnings import warn_user

# Settings of schedules that a plugin has, also where no placeholder of a schedule is given.
_OF_SCHEDULES = ("train_iters", "train_samples", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "min_lr")


class EngineObjects:
    """
    A transformers model with what else one call of `prepare` has, and the engine that becomes of them.

    The call has a loader, whose `batch_size` is the size of one part of a step.
    """

    def __init__(self, call: PrepareCall, model: Module) -> None:
        self._call, self._model = call, model
        self._accelerator = call.accelerator
        self._plugin: Any = call.accelerator.state.megatron_lm_plugin
        self._iterators: list[Any] = []
        self.engine: MegatronEngine | None = None
        self._check()

    @classmethod
    def of(cls, call: PrepareCall) -> EngineObjects | None:
        """The objects of a call that has a transformers model; `None` of one that has none."""
        model = next((item for item in call.objects if isinstance(item, Module) and _is_of_transformers(item)), None)
        return None if model is None else cls(call, model)

    def _check(self) -> None:
        objects = self._call.objects
        refuse_unused_by_engine(self._plugin)
        if sum(isinstance(item, Module) for item in objects) > 1 or sum(isinstance(i, Optimizer) for i in objects) > 1:
            raise ConfigurationError(
                "Several models or optimizers were given to one call of prepare with Megatron, whose engine has one of each. Make an "
                "Accelerator for each model."
            )
        if any(isinstance(item, LRScheduler) for item in objects):
            raise ConfigurationError(
                "You can't use a custom scheduler with Megatron-LM. Please use the `accelerate_nb.utils.MegatronLMDummyScheduler` instead."
            )
        if self._accelerator.strategy.mesh.cp > 1:
            raise NotYetError(
                "context_parallel_size=2 or more was requested for a model of transformers, which is not offered here yet. Use tp_degree, "
                "or a model of megatron-core."
            )
        if GradientState().num_steps > 1:
            raise ConfigurationError(
                "gradient_accumulation_steps was requested with Megatron's engine, where model(**batch) makes a whole step. Pass "
                "MegatronLMPlugin(num_micro_batches=...) in its place."
            )
        if self._accelerator.compiling.backend != DynamoBackend.NO:
            raise ConfigurationError(
                "dynamo_backend was requested with Megatron, which has kernels of its own. Leave it out."
            )

    def prepare(self, requests: Sequence[PrepareRequest]) -> list[Any]:
        """The engine in the place of the model, and its optimizer in that of the optimizer."""
        if self.engine is not None:
            return self._later(requests)
        objects, plugin = self._call.objects, self._plugin
        plugin.set_training_args(self._micro_batch_size(), self._accelerator.strategy.data_replicas[1])
        plugin.set_network_size_args(self._model, first_batch(objects))
        optimizer = next((item for item in objects if isinstance(item, Optimizer)), None)
        if optimizer is not None:
            plugin.set_optimizer_type(optimizer)
        schedule = next((item for item in objects if isinstance(item, MegatronLMDummyScheduler)), None)
        if schedule is not None:
            if schedule.total_num_steps is None and plugin.train_iters is None and plugin.train_samples is None:
                raise ConfigurationError(
                    "MegatronLMDummyScheduler was given without total_num_steps. Pass it, or MegatronLMPlugin(train_iters=...)."
                )
            plugin.set_scheduler_args(schedule)
        initialize(self._accelerator, args_defaults=self._arguments())
        for placeholder in objects:
            if isinstance(placeholder, MegatronLMDummyDataLoader):
                placeholder.get_train_valid_test_datasets_provider(self._accelerator)
        self.engine = MegatronEngine(self._accelerator, *prepare_model_optimizer_scheduler(self._accelerator))
        self._carry_weights()
        made = {True: self.engine, False: self.engine.optimizer}
        return [made[isinstance(request.value, Module)] for request in requests]

    def _later(self, requests: Sequence[PrepareRequest]) -> list[Any]:
        """What a later call gets, which has loaders alone."""
        if requests:
            raise ConfigurationError(
                f"A {type(requests[0].value).__name__} was prepared after Megatron's engine was made, which has one model and one "
                "optimizer. Give both to one call of prepare."
            )
        return []

    def _carry_weights(self) -> None:
        """Give the engine the weights of a model that is converted exactly; those of others begin at random."""
        if self.engine is None or self._plugin.custom_model_provider_function is not None:
            return
        weights = complete_weights(self._model, get_args().padded_vocab_size)
        if weights is not None:
            self._accelerator.strategy.load_model_state(self.engine, weights)
        elif self._accelerator.is_main_process:
            warn_user(
                f"The weights of a {type(self._model).__name__} begin at random in Megatron's engine, as with Accelerate. A GPT2LMHeadModel "
                "or a LlamaForCausalLM comes with its own; accelerator.strategy.load_model_state(model, weights) gives it others."
            )

    def _arguments(self) -> dict[str, Any]:
        plugin: Any = self._plugin
        of_schedules = {name: getattr(plugin, name) for name in _OF_SCHEDULES}
        is_of_megatron = any(isinstance(item, MegatronLMDummyDataLoader) for item in self._call.objects)
        return {
            **architecture(self._model.config),
            **{name: value for name, value in of_schedules.items() if value is not None},
            **plugin.megatron_lm_default_args,
            "recompute_activations": plugin.recompute_activations,
            "num_layers_per_virtual_pipeline_stage": plugin.num_layers_per_virtual_pipeline_stage,
            "megatron_dataset_flag": is_of_megatron or plugin.megatron_dataset_flag,
            **(plugin.other_megatron_args or {}),
        }

    def _micro_batch_size(self) -> int:
        placeholders = [item for item in self._call.objects if isinstance(item, MegatronLMDummyDataLoader)]
        sizes = [
            item.dataset_args["micro_batch_size"] for item in placeholders if "micro_batch_size" in item.dataset_args
        ]
        for loader in self._call.objects:
            if isinstance(loader, DataLoader):
                sizes.append(loader.batch_size or getattr(loader.batch_sampler or loader.sampler, "batch_size", None))
        known = [size for size in sizes if size is not None]
        if not known:
            raise ConfigurationError(
                "You must specify a training or evaluation dataloader in `accelerate.prepare()` when using Megatron-LM. Its batch size, "
                "or MegatronLMDummyDataLoader(micro_batch_size=...), is that of a part of a step."
            )
        return int(min(known) if self._plugin.is_train_batch_min else max(known))

    def replace(self, item: Any) -> Any:
        """A loader in batches for all parts of a step; of the n-th placeholder of a loader the n-th of its three iterators."""
        if isinstance(item, MegatronLMDummyDataLoader):
            self._iterators = self._iterators or list(prepare_data_loader(self._accelerator, item))
            return self._iterators.pop(0)
        return with_all_parts(item) if isinstance(item, DataLoader) else item

    def wrap_schedule(self, optimizers: Sequence[Any]) -> MegatronLMSchedulerWrapper:
        """The engine's schedule in the place of its placeholder."""
        assert self.engine is not None
        return MegatronLMSchedulerWrapper(self.engine.scheduler, optimizers)


def _is_of_transformers(model: Any) -> bool:
    config = getattr(model, "config", None)
    return isinstance(getattr(config, "model_type", None), str) and not hasattr(config, "tensor_model_parallel_size")
