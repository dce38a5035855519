"""The engine that becomes of the objects of one call of prepare, a torch optimizer's settings and a plugin's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate_nb.errors import ConfigurationError, NotYetError
from accelerate_nb.runtime.compat.enums import DynamoBackend
from accelerate_nb.runtime.data.adapter import loader_arguments
from accelerate_nb.runtime.strategies.megatron.conversion import ConvertedWeights, architecture_of, is_converted
from accelerate_nb.runtime.strategies.megatron.engine.arguments import chunks, get_args, initialize, innermost
from accelerate_nb.runtime.strategies.megatron.engine.engine import MegatronEngine
from accelerate_nb.runtime.strategies.megatron.engine.placeholders import (
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMSchedulerWrapper,
)
from accelerate_nb.runtime.strategies.megatron.model import check
from accelerate_nb.runtime.strategies.megatron.plugin import refuse_unused
from accelerate_nb.runtime.strategies.prepare_request import PrepareCall, PrepareRequest
from accelerate_nb.runtime.training.accumulation import GradientState
from accelerate_nb.user_warnings import warn_user


def prepare_model_optimizer_scheduler(accelerator: Any) -> tuple[list[Any], Optimizer | None, Any]:
    """
    The parts of a model on this process as Megatron trains them, its optimizer and its schedule, as the arguments describe them.

    The plugin's `custom_model_provider_function(pre_process, post_process)` builds a part where there is one, and its
    `custom_prepare_model_function(provider)` all parts. Without `train_iters` or `train_samples` there is no schedule.
    """
    plugin = accelerator.state.megatron_lm_plugin
    provider = plugin.custom_model_provider_function
    if plugin.custom_prepare_model_function is None:
        parts = chunks(provider)
    elif provider is None:
        raise ConfigurationError(
            "You must provide a `custom_model_provider_function` when using a `custom_prepare_model_function`. Pass both."
        )
    else:
        made = plugin.custom_prepare_model_function(provider)
        parts = [innermost(part) for part in (made if isinstance(made, (list, tuple)) else [made])]
    strategy = accelerator.strategy
    check(parts, strategy.mesh, plugin, strategy.precision.dtype)
    model = strategy.trained_chunks(parts)
    get_args().model_len = len(model)
    optimizer = None if getattr(get_args(), "optimizer", None) is None else prepare_optimizer(accelerator, model)
    schedule = None if optimizer is None else prepare_scheduler(accelerator, optimizer, None)
    return model, optimizer, schedule


def prepare_optimizer(accelerator: Any, model: Iterable[Module]) -> Optimizer:  # noqa: ARG001  # Accelerate's
    """
    The optimizer of the arguments for these parts of a model: AdamW, which Megatron means by Adam, or SGD.

    Weights for which `no_wd_decay_cond(name, weight)` holds do not decay, by default biases and what else has one dimension; those of
    `scale_lr_cond(name, weight)` learn `lr_mult` times as fast.
    """
    args = get_args()
    groups = _groups(model)
    if args.optimizer == "sgd":
        return SGD(groups, lr=args.lr, momentum=args.sgd_momentum, weight_decay=args.weight_decay)
    betas = (args.adam_beta1, args.adam_beta2)
    return AdamW(groups, lr=args.lr, betas=betas, eps=args.adam_eps, weight_decay=args.weight_decay)


def _groups(model: Iterable[Module]) -> list[dict[str, Any]]:
    args = get_args()
    no_decay = getattr(args, "no_wd_decay_cond", None) or _is_flat
    scaled = getattr(args, "scale_lr_cond", None)
    found: dict[tuple[float, float], list[Tensor]] = {}
    for name, weight in _named_weights(model):
        factor = args.lr_mult if scaled is not None and scaled(name, weight) else 1.0
        found.setdefault((0.0 if no_decay(name, weight) else 1.0, factor), []).append(weight)
    # in the same order on all processes
    return [
        {
            "params": found[decay, factor],
            "weight_decay": decay * args.weight_decay,
            "lr": factor * args.lr,
            "wd_mult": decay,
            "lr_mult": factor,
            **({} if factor == 1.0 else {"max_lr": factor * args.lr, "min_lr": factor * args.min_lr}),
        }
        for decay, factor in sorted(found, reverse=True)
    ]


def _named_weights(model: Iterable[Module]) -> Iterator[tuple[str, Tensor]]:
    for part in model:
        for name, weight in part.named_parameters():
            if weight.requires_grad:
                yield name, weight


def _is_flat(name: str, weight: Tensor) -> bool:
    return name.endswith(".bias") or weight.ndim == 1


def prepare_scheduler(accelerator: Any, optimizer: Any, scheduler: Any) -> Any:  # noqa: ARG001  # Accelerate's
    """
    Megatron's schedule of learning rate and weight decay, in samples, as the arguments describe it.

    `None` without `train_iters` and `train_samples`: rates stay as they are.
    """
    args = get_args()
    if not args.train_iters and not args.train_samples:
        return None
    if args.train_iters:
        total, decay, warmup = args.train_iters, args.lr_decay_iters, args.lr_warmup_iters
        steps_of, wsd = args.global_batch_size, args.lr_wsd_decay_iters
    else:
        total, decay, warmup = args.train_samples, args.lr_decay_samples, args.lr_warmup_samples
        steps_of, wsd = 1, args.lr_wsd_decay_samples
    decay_steps = (decay or total) * steps_of
    warmup_steps = (warmup or 0) * steps_of
    if args.lr_warmup_fraction is not None:
        warmup_steps = args.lr_warmup_fraction * decay_steps
    if warmup_steps >= decay_steps:
        raise ConfigurationError(
            f"A schedule with {warmup_steps // steps_of} steps of warm-up was requested that ends after {decay_steps // steps_of}. Pass "
            "fewer of them, or more steps; both are those of one process, which copies divide among them."
        )
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    is_constant = args.weight_decay_incr_style == "constant"
    first = args.weight_decay if is_constant or args.start_weight_decay is None else args.start_weight_decay
    last = args.weight_decay if is_constant or args.end_weight_decay is None else args.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=first,
        end_wd=last,
        wd_incr_steps=total * steps_of,
        wd_incr_style=args.weight_decay_incr_style,
        wsd_decay_steps=None if wsd is None else wsd * steps_of,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def prepare_data_loader(accelerator: Any, dataloader: Any) -> Any:
    """
    A loader whose batches have as many samples as the parts of a step together, prepared as others are.

    Of a `MegatronLMDummyDataLoader` the iterators over three data sets, for training, evaluation and a test.
    """
    if isinstance(dataloader, MegatronLMDummyDataLoader):
        dataloader.set_megatron_data_args()
        return dataloader.build_train_valid_test_data_iterators(accelerator)
    return accelerator.prepare_data_loader(dataloader)


def with_all_parts(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader of the same data in batches for all parts of a step: `num_micro_batches` times the `micro_batch_size`."""
    args = get_args()
    size = args.micro_batch_size * args.num_micro_batches
    arguments: dict[str, Any] = loader_arguments(loader)
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return DataLoader(loader.dataset, batch_size=size, drop_last=loader.drop_last, **arguments)
    if loader.batch_size is None:
        # a batch sampler of the person's own, which is asked for larger batches, as Accelerate does
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if not hasattr(sampler, "batch_size"):
            raise ConfigurationError(
                f"A loader whose batches come from a {type(sampler).__name__} was given to Megatron, which needs another size of them. Give "
                "it one with batch_size=."
            )
        sampler.batch_size = size
        return loader
    return DataLoader(loader.dataset, batch_size=size, sampler=loader.sampler, drop_last=loader.drop_last, **arguments)


def first_batch(loaders: Iterable[Any]) -> Any:
    """A batch of the size that a loader gives, of its first samples; `None` of data that can be read once."""
    for loader in loaders:
        if not isinstance(loader, DataLoader):
            continue
        if isinstance(loader.dataset, torch.utils.data.IterableDataset) or loader.batch_size is None:
            return None
        dataset: Any = loader.dataset
        with torch.random.fork_rng(devices=[]):
            return loader.collate_fn([dataset[index] for index in range(min(loader.batch_size, len(dataset)))])
    return None


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
        refuse_unused(self._plugin, by_engine=True)
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
        args = get_args()
        if is_converted(self._model):
            weights = ConvertedWeights(args.architecture.weights(args.padded_vocab_size), self._model.state_dict())
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
        config = self._model.config
        architecture = architecture_of(config)
        end = getattr(config, "eos_token_id", None)
        return {
            **architecture.settings,
            "architecture": architecture,
            # the first of several tokens that end a text
            "eos_token_id": end[0] if isinstance(end, list) else end,
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
