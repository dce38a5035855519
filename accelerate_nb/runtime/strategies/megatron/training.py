"""The arguments of a training with Megatron, and what is made of them: data, optimizer, schedule."""

import itertools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, IterableDataset

from accelerate_nb.errors import ConfigurationError, DataError, StateError
from accelerate_nb.runtime.data.adapter import loader_arguments
from accelerate_nb.runtime.operations.collective import gather_object
from accelerate_nb.runtime.operations.nested import send_to_device
from accelerate_nb.runtime.strategies.base import Placeholder
from accelerate_nb.runtime.training.optimizer import EngineOptimizer, EngineSchedule
from accelerate_nb.runtime.world.registry import at_world_exit

# What `accelerate.utils.megatron_lm` offers.
__all__ = [
    "MegatronLMDummyDataLoader", "MegatronLMDummyScheduler", "MegatronLMOptimizerWrapper",
    "MegatronLMSchedulerWrapper", "finish_mpu_init", "get_args", "initialize", "prepare_data_loader",
    "prepare_optimizer", "prepare_scheduler",
]  # fmt: skip

# What steps, models and schedules read where neither the plugin nor the model says it.
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("iteration", "consumed_train_samples", "consumed_valid_samples", "consumed_test_samples"), 0),
    "seed": 1234,
    # of a model
    **dict.fromkeys(("architecture", "padded_vocab_size")),
    "model_return_dict": False,
    "make_vocab_size_divisible_by": 1,
    "transformer_impl": "local",
    # of a batch
    **dict.fromkeys(("eos_token_id", "data_path", "data_cache_path")),
    **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "check_for_nan_in_loss_and_grad"), False),
    "split": "969, 30, 1",
    # of an optimizer and a schedule
    **dict.fromkeys(("optimizer", "lr_wsd_decay_iters", "lr_wsd_decay_samples")),
    **dict.fromkeys(("lr_warmup_init", "weight_decay"), 0.0),
    "lr_wsd_decay_style": "exponential",
}


class _Current:
    """The arguments of this process's training, as functions of Megatron-LM's scripts ask for them."""

    arguments: Namespace | None = None


def get_args() -> Namespace:
    """The arguments of the training; `StateError` before a model was prepared."""
    if _Current.arguments is None:
        raise StateError(
            "The arguments of Megatron-LM were asked for before there are any. Give accelerator.prepare a model of transformers first."
        )
    return _Current.arguments


def initialize(
    accelerator: Any,
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> None:
    """
    Begin a training with the plugin's settings and these arguments, which `get_args()` returns from now on.

    `extra_args_provider` adds arguments of its own, with their defaults, to a parser. The groups of processes are the `Accelerator`'s.
    """
    extra = {}
    if extra_args_provider is not None:
        extra = vars(extra_args_provider(ArgumentParser(allow_abbrev=False)).parse_known_args([])[0])
    plugin, mesh = accelerator.strategy.megatron_lm_plugin, accelerator.world.mesh
    settings = {field.name: getattr(plugin, field.name) for field in fields(plugin)}
    arguments = Namespace(**{**_DEFAULTS, **settings, **extra, **(args_defaults or {})})
    arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size = mesh.tp, mesh.pp
    arguments.context_parallel_size = mesh.cp
    arguments.rank, arguments.world_size = accelerator.process_index, accelerator.num_processes
    arguments.params_dtype = accelerator.strategy.precision.dtype
    words = getattr(arguments, "orig_vocab_size", 0)
    if arguments.padded_vocab_size is None:
        # with the rows that make parts of it equal
        multiple = arguments.make_vocab_size_divisible_by * mesh.tp
        arguments.padded_vocab_size = -(-words // multiple) * multiple
    elif arguments.padded_vocab_size < words:
        raise ConfigurationError(
            f"padded_vocab_size={arguments.padded_vocab_size} was requested for a vocabulary of {words} words. Pass as many, or more."
        )
    arguments.virtual_pipeline_model_parallel_size = None
    if (layers := arguments.num_layers_per_virtual_pipeline_stage) is not None:
        parts, rest = divmod(arguments.num_layers, mesh.pp * layers)
        if mesh.pp == 1 or rest:
            raise ConfigurationError(
                f"num_layers_per_virtual_pipeline_stage={layers} was requested for {arguments.num_layers} layers in {mesh.pp} stages. Pass a "
                "number that divides those of a stage, and pp_degree=2 or more."
            )
        arguments.virtual_pipeline_model_parallel_size = parts if parts > 1 else None
    _Current.arguments = arguments
    # the training is over
    at_world_exit(lambda: setattr(_Current, "arguments", None))


def finish_mpu_init() -> None:
    """Nothing is left to do: the groups of processes were made with the `Accelerator`."""
    get_args()


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
    args, is_iterable = get_args(), isinstance(loader.dataset, IterableDataset)
    size = args.micro_batch_size * args.num_micro_batches
    if loader.batch_size is None and not is_iterable:
        # a batch sampler of the person's own, which is asked for larger batches, as Accelerate does
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if not hasattr(sampler, "batch_size"):
            raise ConfigurationError(
                f"A loader with a {type(sampler).__name__} was given to Megatron, which needs larger batches. Give it one with batch_size=."
            )
        sampler.batch_size = size
        return loader
    order = None if is_iterable else loader.sampler
    return DataLoader(loader.dataset, size, sampler=order, drop_last=loader.drop_last, **loader_arguments(loader))


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
