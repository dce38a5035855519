"""The loaders, optimizers and schedules of an engine under Accelerate's names, and the engine that becomes of one call of prepare."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate_nb.errors import ConfigurationError, DataError, NotYetError
from accelerate_nb.runtime.data.adapter import loader_arguments
from accelerate_nb.runtime.strategies.base import PrepareCall, PrepareRequest
from accelerate_nb.runtime.strategies.engine_objects import EngineOptimizer, EngineSchedule, Placeholder
from accelerate_nb.runtime.strategies.megatron.conversion import ConvertedWeights, architecture_of, is_converted
from accelerate_nb.runtime.strategies.megatron.engine import MegatronEngine
from accelerate_nb.runtime.strategies.megatron.model import check
from accelerate_nb.runtime.strategies.megatron.plugin import OF_SCHEDULES, refuse_unused
from accelerate_nb.runtime.strategies.megatron.train_steps import chunks, get_args, initialize, innermost
from accelerate_nb.runtime.training.accumulation import GradientState
from accelerate_nb.user_warnings import warn_user


class MegatronLMOptimizerWrapper(EngineOptimizer):
    """An optimizer that Megatron's engine steps when it is called; its own `step` only notes that a step was made."""

    skips = "skipped_iter"


class MegatronLMDummyScheduler(Placeholder):
    """
    A placeholder of the schedule that Megatron-LM makes of a plugin's settings.

    `total_num_steps` and `warmup_num_steps` are those of one process, as with Accelerate's schedules; each copy makes its part of them.

    >>> MegatronLMDummyScheduler(None, total_num_steps=100).warmup_num_steps
    0
    """

    made_by = "Megatron"

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMSchedulerWrapper(EngineSchedule):
    """A schedule that Megatron's engine moves when it steps; its own `step` does nothing."""

    def get_last_lr(self) -> list[float]:
        """The learning rates in force."""
        return [float(group["lr"]) for group in self.scheduler.optimizer.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the schedule its state back."""
        # Megatron's moves on by the steps that it finds
        self.scheduler.num_steps = 0
        self.scheduler.load_state_dict(state_dict)


_SPLITS = 3


class MegatronLMDummyDataLoader(Placeholder):
    """
    A placeholder of the loaders of Megatron's own data sets.

    Give it to `prepare` up to three times: it becomes iterators over the data sets for training, for evaluation and for a test, each of
    which yields batches for all parts of a step. `dataset_kwargs` are arguments of Megatron-LM for data, such as `data_path`, `split`,
    `seq_length`, and `micro_batch_size`.

    >>> MegatronLMDummyDataLoader(micro_batch_size=4).dataset_args["megatron_dataset_flag"]
    True
    """

    made_by = "Megatron"

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = {**dataset_kwargs, "megatron_dataset_flag": True}

    def set_megatron_data_args(self) -> None:
        """Have the training's arguments say what this placeholder does."""
        vars(get_args()).update(self.dataset_args)

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Callable[[Sequence[int]], Any]:
        """The plugin's function of three numbers of samples that returns three data sets, or that of Megatron's for a GPT."""
        own = accelerator.state.megatron_lm_plugin.custom_megatron_datasets_provider_function
        return _gpt_datasets if own is None else own

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> tuple[Any, Any, Any]:
        """Iterators over the three data sets; `None` for one that there is not."""
        args, plugin = get_args(), accelerator.state.megatron_lm_plugin
        consumed = plugin.consumed_samples or [0] * _SPLITS
        args.consumed_train_samples, args.consumed_valid_samples, args.consumed_test_samples = consumed
        provider = self.get_train_valid_test_datasets_provider(accelerator)
        found = provider(_numbers_of_samples(args))
        replica = accelerator.strategy.data_replicas
        first, second, third = (
            None if dataset is None else iter(_loader(dataset, start, replica, accelerator.device))
            for dataset, start in zip(found, consumed, strict=True)
        )
        return first, second, third


def _numbers_of_samples(args: Namespace) -> list[int]:
    """How many samples a training reads of each data set."""
    size = args.global_batch_size
    if not args.train_iters and not args.train_samples:
        raise ConfigurationError(
            "Megatron's data sets were requested without the number of steps. Give prepare a MegatronLMDummyScheduler with "
            "total_num_steps, or pass MegatronLMPlugin(train_iters=...)."
        )
    train = args.train_samples or args.train_iters * size
    evaluations = train // size // args.eval_interval + 1
    return [train, evaluations * args.eval_iters * size, args.eval_iters * size]


def _loader(dataset: Any, consumed: int, replica: tuple[int, int], device: torch.device) -> Iterator[Any]:
    """The batches of this process's copy of the model, without end: each for all parts of a step."""
    from accelerate_nb.runtime.operations.nested import send_to_device

    args = get_args()
    index, replicas = replica
    size = args.micro_batch_size * args.num_micro_batches
    if len(dataset) < size * replicas:
        raise DataError(
            f"A data set of {len(dataset)} samples was given for steps of {size * replicas}. Give a longer one, or a smaller batch size."
        )
    steps = len(dataset) // (size * replicas)
    first = consumed // (size * replicas) % steps
    while True:
        starts = ((step * replicas + index) * size for step in range(first, steps))
        loader = DataLoader(
            dataset,
            # one batch at a time: data sets have millions of samples
            batch_sampler=(list(range(start, start + size)) for start in starts),
            num_workers=getattr(args, "num_workers", 0),
            pin_memory=device.type == "cuda",
        )
        for batch in loader:
            yield send_to_device(batch, device)
        first = 0


def _gpt_datasets(numbers: Sequence[int]) -> Any:
    """Megatron's data sets of the tokens in indexed files (`data_path`), for training, evaluation and a test."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    args = get_args()
    if args.data_path is None:
        raise ConfigurationError(
            "MegatronLMDummyDataLoader was given without data_path, the prefix of indexed files. Pass it, or a "
            "custom_megatron_datasets_provider_function in the plugin."
        )
    paths = [args.data_path] if isinstance(args.data_path, str) else list(args.data_path)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(paths),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=_Tokens(args.orig_vocab_size, args.eos_token_id),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.reset_attention_mask,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, list(numbers), lambda: True, config).build()


class _Tokens:
    """What Megatron's data sets ask a tokenizer for, of files that have tokens already."""

    def __init__(self, vocab_size: int, end: int | None) -> None:
        self.vocab_size = vocab_size
        self.eod = self.pad = -1 if end is None else end
        self.unique_identifiers = {"class": type(self).__name__, "vocab_size": vocab_size, "eod": self.eod}


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
    no_decay = getattr(args, "no_wd_decay_cond", None) or (
        lambda name, weight: name.endswith(".bias") or weight.ndim == 1
    )
    scaled = getattr(args, "scale_lr_cond", None)
    found: dict[tuple[float, float], list[Tensor]] = {}
    for name, weight in chain.from_iterable(part.named_parameters() for part in model):
        if weight.requires_grad:
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

    def prepare(self, requests: Sequence[PrepareRequest]) -> list[Any]:
        """The engine in the place of the model, and its optimizer in that of the optimizer."""
        if self.engine is not None and requests:
            raise ConfigurationError(
                f"A {type(requests[0].value).__name__} was prepared after Megatron's engine was made, which has one model and one "
                "optimizer. Give both to one call of prepare."
            )
        if self.engine is not None:
            return []
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
        return [self.engine if isinstance(request.value, Module) else self.engine.optimizer for request in requests]

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
        of_schedules = {name: getattr(plugin, name) for name in OF_SCHEDULES}
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
        sizes: list[Any] = []
        for item in self._call.objects:
            if isinstance(item, MegatronLMDummyDataLoader):
                sizes.append(item.dataset_args.get("micro_batch_size"))
            elif isinstance(item, DataLoader):
                sizes.append(item.batch_size or getattr(item.batch_sampler or item.sampler, "batch_size", None))
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
