"""The loaders, optimizers and schedules of an engine under Accelerate's names, and the engine that becomes of one call of prepare."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from accelerate_nb.errors import ConfigurationError, DataError, NotYetError
from accelerate_nb.runtime.data.adapter import loader_arguments
from accelerate_nb.runtime.operations.collective import gather_object
from accelerate_nb.runtime.operations.nested import send_to_device
from accelerate_nb.runtime.strategies.base import Placeholder, PrepareCall
from accelerate_nb.runtime.strategies.megatron import conversion
from accelerate_nb.runtime.strategies.megatron.engine import MegatronEngine, innermost
from accelerate_nb.runtime.strategies.megatron.plugin import get_args, initialize, refuse_unused
from accelerate_nb.runtime.training.accumulation import GradientState
from accelerate_nb.runtime.training.optimizer import EngineOptimizer, EngineSchedule
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
        return accelerator.state.megatron_lm_plugin.custom_megatron_datasets_provider_function or _gpt_datasets

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> tuple[Any, ...]:
        """Iterators over the three data sets; `None` for one that there is not."""
        args = get_args()
        consumed = accelerator.state.megatron_lm_plugin.consumed_samples or [0, 0, 0]
        args.consumed_train_samples, args.consumed_valid_samples, args.consumed_test_samples = consumed
        size = args.global_batch_size
        if not args.train_iters and not args.train_samples:
            raise ConfigurationError(
                "Megatron's data sets were requested without a number of steps. Pass MegatronLMPlugin(train_iters=...)."
            )
        train = args.train_samples or args.train_iters * size
        evaluations = train // size // args.eval_interval + 1
        provider = self.get_train_valid_test_datasets_provider(accelerator)
        found = provider([train, evaluations * args.eval_iters * size, args.eval_iters * size])
        return tuple(
            None if dataset is None else _batches(accelerator, dataset, start)
            for dataset, start in zip(found, consumed, strict=True)
        )


def _batches(accelerator: Any, dataset: Any, consumed: int) -> Iterator[Any]:
    """The batches of this process's copy of the model, without end: each for all parts of a step."""
    args, (index, replicas) = get_args(), accelerator.strategy.data_replicas
    size = args.micro_batch_size * args.num_micro_batches
    if not (steps := len(dataset) // (size * replicas)):
        raise DataError(
            f"A data set of {len(dataset)} samples was given for steps of {size * replicas}. Give a longer one, or a smaller batch size."
        )
    starts = ((step % steps * replicas + index) * size for step in itertools.count(consumed // (size * replicas)))
    loader = DataLoader(
        dataset,
        # one batch at a time: data sets have millions of samples
        batch_sampler=(list(range(start, start + size)) for start in starts),
        num_workers=getattr(args, "num_workers", 0),
        pin_memory=accelerator.device.type == "cuda",
    )
    return (send_to_device(batch, accelerator.device) for batch in loader)


def _gpt_datasets(numbers: Sequence[int]) -> Any:
    """Megatron's data sets of the tokens in indexed files (`data_path`), for training, evaluation and a test."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    args = get_args()
    if args.data_path is None:
        raise ConfigurationError(
            "MegatronLMDummyDataLoader was given without data_path. Pass it, or a provider in the plugin."
        )
    paths = [args.data_path] if isinstance(args.data_path, str) else list(args.data_path)
    # what data sets ask a tokenizer for, of files that have tokens already
    end = -1 if args.eos_token_id is None else args.eos_token_id
    described = {"class": "Tokens", "vocab_size": args.orig_vocab_size, "eod": end}
    tokenizer = SimpleNamespace(vocab_size=args.orig_vocab_size, eod=end, pad=end, unique_identifiers=described)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(paths),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.reset_attention_mask,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, list(numbers), lambda: True, config).build()


def prepare_model_optimizer_scheduler(accelerator: Any) -> tuple[list[Any], Optimizer | None, Any]:
    """
    The parts of a model on this process as Megatron trains them, its optimizer and its schedule, as the arguments describe them.

    The plugin's `custom_model_provider_function(pre_process, post_process)` builds a part where there is one, and its
    `custom_prepare_model_function(provider)` all parts. Without `train_iters` or `train_samples` there is no schedule.
    """
    args, plugin = get_args(), accelerator.state.megatron_lm_plugin
    provider = plugin.custom_model_provider_function
    if plugin.custom_prepare_model_function is None:
        parts = conversion.stages(provider or conversion.model_provider_func, args.virtual_pipeline_model_parallel_size)
    elif provider is None:
        raise ConfigurationError(
            "You must provide a `custom_model_provider_function` when using a `custom_prepare_model_function`. Pass both."
        )
    else:
        made = plugin.custom_prepare_model_function(provider)
        parts = [innermost(part) for part in (made if isinstance(made, (list, tuple)) else [made])]
    model = accelerator.strategy.trained_chunks(parts)
    optimizer = None if args.optimizer is None else prepare_optimizer(accelerator, model)
    schedule = None if optimizer is None else prepare_scheduler(accelerator, optimizer, None)
    return model, optimizer, schedule


def prepare_optimizer(accelerator: Any, model: Iterable[Module]) -> Optimizer:  # noqa: ARG001  # Accelerate's
    """
    The optimizer of the arguments for these parts of a model: AdamW, which Megatron means by Adam, or SGD.

    Weights for which `no_wd_decay_cond(name, weight)` holds do not decay, by default biases and what else has one dimension; those of
    `scale_lr_cond(name, weight)` learn `lr_mult` times as fast.
    """
    args = get_args()
    no_decay = args.no_wd_decay_cond or (lambda name, weight: name.endswith(".bias") or weight.ndim == 1)
    found: dict[tuple[float, float], list[Tensor]] = {}
    for name, weight in itertools.chain.from_iterable(part.named_parameters() for part in model):
        if weight.requires_grad:
            factor = args.lr_mult if args.scale_lr_cond is not None and args.scale_lr_cond(name, weight) else 1.0
            found.setdefault((0.0 if no_decay(name, weight) else 1.0, factor), []).append(weight)
    groups = [
        {
            "params": found.get((decay, factor), []),
            "weight_decay": decay * args.weight_decay,
            "lr": factor * args.lr,
            "wd_mult": decay,
            **({} if factor == 1.0 else {"max_lr": factor * args.lr, "min_lr": factor * args.min_lr}),
        }
        # the same on all processes, also where a stage has no weights of a group
        for decay, factor in sorted(set(gather_object(list(found))), reverse=True)
    ]
    if args.optimizer == "sgd":
        return SGD(groups, lr=args.lr, momentum=args.sgd_momentum, weight_decay=args.weight_decay)
    betas = (args.adam_beta1, args.adam_beta2)
    return AdamW(groups, lr=args.lr, betas=betas, eps=args.adam_eps, weight_decay=args.weight_decay)


def prepare_scheduler(accelerator: Any, optimizer: Any, scheduler: Any) -> Any:  # noqa: ARG001  # Accelerate's
    """
    Megatron's schedule of learning rate and weight decay, in samples, as the arguments describe it.

    `None` without `train_iters` and `train_samples`: rates stay as they are.
    """
    args = get_args()
    if not args.train_iters and not args.train_samples:
        return None
    unit, size = ("iters", args.global_batch_size) if args.train_iters else ("samples", 1)
    total, decay, warmup, wsd = (
        getattr(args, f"{name}_{unit}") for name in ("train", "lr_decay", "lr_warmup", "lr_wsd_decay")
    )
    decay = decay or total
    warmup = (warmup or 0) if args.lr_warmup_fraction is None else args.lr_warmup_fraction * decay
    if warmup >= decay:
        raise ConfigurationError(
            f"{warmup} steps of warm-up were requested in a schedule of {decay}. Pass fewer; both are counted as on one process."
        )
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    is_constant = args.weight_decay_incr_style == "constant"
    decays = [None, None] if is_constant else [args.start_weight_decay, args.end_weight_decay]
    first, last = (args.weight_decay if value is None else value for value in decays)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup * size,
        lr_decay_steps=decay * size,
        lr_decay_style=args.lr_decay_style,
        start_wd=first,
        end_wd=last,
        wd_incr_steps=total * size,
        wd_incr_style=args.weight_decay_incr_style,
        wsd_decay_steps=None if wsd is None else wsd * size,
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
    if loader.batch_size is None and not isinstance(loader.dataset, IterableDataset):
        # a batch sampler of the person's own, which is asked for larger batches, as Accelerate does
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if not hasattr(sampler, "batch_size"):
            raise ConfigurationError(
                f"A loader with a {type(sampler).__name__} was given to Megatron, which needs larger batches. Give it one with batch_size=."
            )
        sampler.batch_size = size
        return loader
    order = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    how = {**order, **loader_arguments(loader)}
    return DataLoader(loader.dataset, batch_size=size, drop_last=loader.drop_last, **how)


def _of(call: PrepareCall, type_: type) -> list[Any]:
    """The objects of this type."""
    return [item for item in call.objects if isinstance(item, type_)]


def _first_batch(call: PrepareCall) -> Any:
    """A batch of the size that a loader gives, of its first samples; `None` of data that can be read once."""
    loader = next(iter(_of(call, DataLoader)), None)
    if loader is None or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    count = min(loader.batch_size, len(loader.dataset))
    with torch.random.fork_rng(devices=[]):
        return loader.collate_fn([loader.dataset[index] for index in range(count)])


def transformers_model(call: PrepareCall) -> Any:
    """The first model of transformers, of which an engine is made; `None` where there is none."""
    for model in _of(call, Module):
        config = getattr(model, "config", None)
        if isinstance(getattr(config, "model_type", None), str) and not hasattr(config, "tensor_model_parallel_size"):
            return model
    return None


def _check_call(call: PrepareCall) -> None:
    """Raise an error that names what no engine can be made of, in a call of `prepare` with a transformers model."""
    refuse_unused(call.accelerator.state.megatron_lm_plugin, by_engine=True)
    if _of(call, LRScheduler):
        raise ConfigurationError(
            "You can't use a custom scheduler with Megatron-LM. Please use the `accelerate_nb.utils.MegatronLMDummyScheduler` instead."
        )
    if call.accelerator.world.mesh.cp > 1:
        raise NotYetError(
            "context_parallel_size was requested for a model of transformers. Use tp_degree, or a model of megatron-core."
        )
    if GradientState().num_steps > 1:
        raise ConfigurationError(
            "gradient_accumulation_steps was requested with Megatron's engine. Pass MegatronLMPlugin(num_micro_batches=...) instead."
        )


def engine_of(call: PrepareCall) -> MegatronEngine:
    """The engine that becomes of a transformers model, and of what else its call of `prepare` has."""
    _check_call(call)
    accelerator, model = call.accelerator, transformers_model(call)
    plugin: Any = accelerator.state.megatron_lm_plugin
    plugin.set_training_args(_micro_batch_size(call, plugin), accelerator.strategy.data_replicas[1])
    plugin.set_network_size_args(model, _first_batch(call))
    for optimizer in _of(call, Optimizer):
        plugin.set_optimizer_type(optimizer)
    for schedule in _of(call, MegatronLMDummyScheduler):
        if schedule.total_num_steps is None and plugin.train_iters is None:
            raise ConfigurationError(
                "MegatronLMDummyScheduler was given without total_num_steps. Pass it, or MegatronLMPlugin(train_iters=...)."
            )
        plugin.set_scheduler_args(schedule)
    architecture = conversion.architecture_of(model.config)
    end = getattr(model.config, "eos_token_id", None)
    arguments = {
        **architecture.settings,
        "architecture": architecture,
        # the first of several tokens that end a text
        "eos_token_id": end[0] if isinstance(end, list) else end,
        **plugin.megatron_lm_default_args,
        "num_layers_per_virtual_pipeline_stage": plugin.num_layers_per_virtual_pipeline_stage,
        "megatron_dataset_flag": bool(_of(call, MegatronLMDummyDataLoader)) or plugin.megatron_dataset_flag,
        **(plugin.other_megatron_args or {}),
    }
    initialize(accelerator, args_defaults=arguments)
    engine = MegatronEngine(accelerator, *prepare_model_optimizer_scheduler(accelerator))
    if plugin.custom_model_provider_function is not None:
        return engine
    if conversion.is_converted(model):
        weights = architecture.weights(get_args().padded_vocab_size)
        accelerator.strategy.load_model_state(engine, conversion.ConvertedWeights(weights, model.state_dict()))
    elif accelerator.is_main_process:
        warn_user(
            f"The weights of a {type(model).__name__} begin at random in Megatron's engine, as with Accelerate. Prepare one with a head, or "
            "give it others by accelerator.strategy.load_model_state(model, weights)."
        )
    return engine


def _micro_batch_size(call: PrepareCall, plugin: Any) -> int:
    sizes = [item.dataset_args.get("micro_batch_size") for item in _of(call, MegatronLMDummyDataLoader)]
    for loader in _of(call, DataLoader):
        sizes.append(loader.batch_size or getattr(loader.batch_sampler or loader.sampler, "batch_size", None))
    if not (known := [size for size in sizes if size is not None]):
        raise ConfigurationError(
            "You must specify a training or evaluation dataloader in `accelerate.prepare()` when using Megatron-LM, with its batch size."
        )
    return int(min(known) if plugin.is_train_batch_min else max(known))
