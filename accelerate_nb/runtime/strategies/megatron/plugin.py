"""The settings of Megatron-LM in Accelerate's words, the arguments of a training, and what is made of them: data, optimizer, schedule."""

import itertools
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType, SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, IterableDataset

from accelerate_nb.config.options import megatron
from accelerate_nb.errors import ConfigurationError, DataError, NotYetError, StateError
from accelerate_nb.runtime.data.adapter import loader_arguments
from accelerate_nb.runtime.operations.collective import gather_object
from accelerate_nb.runtime.operations.nested import send_to_device
from accelerate_nb.runtime.strategies.base import Placeholder
from accelerate_nb.runtime.training.optimizer import EngineOptimizer, EngineSchedule
from accelerate_nb.runtime.world.registry import at_world_exit
from accelerate_nb.user_warnings import warn_user

# The names that Megatron-LM gives to these settings, as Accelerate passes them on.
_ARGUMENTS = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}
_PASSED_ON = (
    *(option.name for option in fields(megatron.MegatronOptions) if option.name != "recompute_activations"),
    *("DDP_impl", "pipeline_model_parallel_split_rank", "num_layers_per_virtual_pipeline_stage", "consumed_samples"),
    *("no_wd_decay_cond", "scale_lr_cond", "lr_mult", "megatron_dataset_flag", "eval_iters", "eval_interval"),
)
_OF_SCHEDULES = (
    *("train_iters", "lr_warmup_iters", "train_samples", "lr_warmup_samples", "lr_decay_iters", "lr_decay_samples"),
    *("lr_warmup_fraction", "lr_decay_style", "weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
    "min_lr",
)
# What the training of a model of megatron-core reads; another setting is in its `TransformerConfig`, or of the engine.
_READ_BY_STEPS = (
    *("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("num_micro_batches", "gradient_clipping", "sequence_parallelism", "use_distributed_optimizer"),
)
# Of Megatron-LM's own loop and logs, which nothing here has.
_OF_ITS_LOOP = ("pipeline_model_parallel_split_rank", "tensorboard_dir", "set_all_logging_options")


@dataclass
class MegatronLMPlugin(megatron.MegatronOptions):
    """
    The settings of Megatron-LM.

    `tp_degree`, `pp_degree`, `context_parallel_size` and `expert_model_parallel_size` are the numbers of processes that split a model;
    the rest of the processes have copies. A batch is cut in `num_micro_batches` parts.
    What is `None` is read from the variables `MEGATRON_LM_*`, and has Accelerate's default without them, but for
    `context_parallel_size`, which is 1.

    >>> MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=4).megatron_lm_default_args["clip_grad"]
    1.0
    """

    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        megatron.OPTIONS.complete(self, os.environ)
        degrees = ("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size", "num_micro_batches")
        if wrong := [f"{name}={getattr(self, name)}" for name in degrees if getattr(self, name) < 1]:
            raise ConfigurationError(f"{', '.join(wrong)} was requested, but it is 1 at least. Leave it out for 1.")
        self.DDP_impl = "local" if self.pp_degree > 1 or self.use_distributed_optimizer else "torch"
        if self.consumed_samples is not None:
            self.consumed_samples += [0] * (3 - len(self.consumed_samples))
        self.megatron_lm_default_args = {_ARGUMENTS.get(name, name): getattr(self, name) for name in _PASSED_ON}
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
        if self.other_megatron_args is not None:
            self.megatron_lm_default_args.update(self.other_megatron_args)

    def set_network_size_args(self, model: Any, batch_data: Any = None) -> None:
        """Take layers, widths and the length of sequences of a GPT-2 or a Llama of transformers; `ConfigurationError` for another type."""
        kind = model.config.model_type
        if kind not in MODEL_CONFIGS_TO_MEGATRON_PARSERS:
            raise ConfigurationError(
                f"A model of the type {kind!r} was given to Megatron, which trains {' and '.join(MODEL_CONFIGS_TO_MEGATRON_PARSERS)} of "
                "transformers. Build it of megatron-core, or train this one with strategy='fsdp'."
            )
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[kind](self, model, batch_data)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Compute in this type."""
        if mixed_precision == "bf16":
            self.DDP_impl = self.megatron_lm_default_args["DDP_impl"] = "local"
        if mixed_precision in {"bf16", "fp16"}:
            self.megatron_lm_default_args[mixed_precision] = True

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Take so many samples in each part of a batch, on so many copies."""
        self.data_parallel_size, self.micro_batch_size = dp_degree, micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * self.num_micro_batches
        sizes = ("data_parallel_size", "micro_batch_size", "global_batch_size")
        self.megatron_lm_default_args.update({name: getattr(self, name) for name in sizes})

    def set_optimizer_type(self, optimizer: Any) -> None:
        """Step as this optimizer of torch does; `ConfigurationError` for one that is neither Adam nor SGD."""
        name, defaults, arguments = type(optimizer).__name__.lower(), optimizer.defaults, self.megatron_lm_default_args
        if "adam" in name:
            arguments["optimizer"] = "adam"
            arguments["adam_beta1"], arguments["adam_beta2"] = defaults["betas"]
            arguments["adam_eps"] = defaults["eps"]
        elif "sgd" in name:
            arguments["optimizer"] = "sgd"
            arguments["sgd_momentum"] = defaults["momentum"]
        else:
            raise ConfigurationError(
                f"Optimizer {name} is not supported by Megatron-LM. Pass one of Adam, AdamW and SGD, or train with strategy='megatron'."
            )
        arguments["lr"], arguments["weight_decay"] = defaults["lr"], defaults["weight_decay"]

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Take the numbers of steps of a `MegatronLMDummyScheduler`, which are those of one process."""
        copies = self.megatron_lm_default_args["data_parallel_size"]
        numbers = (("train", scheduler.total_num_steps, None), ("lr_warmup", scheduler.warmup_num_steps, 0))
        for kind, steps, no_samples in numbers:
            iters, samples = f"{kind}_iters", f"{kind}_samples"
            if getattr(self, iters) is None:
                if getattr(self, samples) is not None:
                    warn_user(
                        f"Ignoring `{samples}` as `{iters}` based on scheduler is being used for training. Pass one of them."
                    )
                setattr(self, iters, steps // copies)
                setattr(self, samples, no_samples)
        self.megatron_lm_default_args.update({name: getattr(self, name) for name in _OF_SCHEDULES})

    def set_tensorboard_logging_options(self) -> None:
        """Log whatever can be logged; an `Accelerator`'s trackers do, so that there is nothing to set here."""


def refuse_unused(plugin: MegatronLMPlugin, *, by_engine: bool = False) -> None:
    """Raise `NotYetError` for a setting that was given and that is not read: by the engine, or for a model that is built in a cell."""
    defaults = {item.name: item.metadata["entry"].default if item.metadata else item.default for item in fields(plugin)}
    given = [name for name, default in defaults.items() if getattr(plugin, name) != default]
    not_read = (*megatron.NOT_READ, *_OF_ITS_LOOP)
    names = [name for name in given if (name in not_read if by_engine else name not in _READ_BY_STEPS)]
    if names:
        instead = "Leave it out." if by_engine else "Write it in the model's TransformerConfig where that has it."
        raise NotYetError(
            f"MegatronLMPlugin({', '.join(f'{name}=...' for name in names)}) was requested, which nothing reads in this training. {instead}"
        )


def parse_gpt2_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Read the sizes of a GPT-2."""
    plugin, config = megatron_lm_plugin, model.config
    if plugin.seq_length is not None and plugin.decoder_seq_length is not None:
        warn_user("Both `seq_length` and `decoder_seq_length` are set. Using `decoder_seq_length`. Pass one of them.")
    sizes = (config.n_layer, config.n_embd, config.n_head, config.n_positions)
    _take_sizes(plugin, config, batch_data, plugin.decoder_seq_length or plugin.seq_length, sizes, "GPT2BPETokenizer")


def parse_llama_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Read the sizes of a Llama."""
    plugin, config = megatron_lm_plugin, model.config
    length = plugin.seq_length or getattr(config, "max_sequence_length", None) or plugin.decoder_seq_length
    sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.max_position_embeddings)
    _take_sizes(plugin, config, batch_data, length, sizes, "Llama2Tokenizer")


def _take_sizes(
    plugin: Any, config: Any, batch_data: Any, length: int | None, sizes: tuple[int, ...], tokenizer: str
) -> None:
    """Note the sizes, and a length of sequences: the given one, a batch's, or the longest that the model takes."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    plugin.seq_length = int(length or (sizes[-1] if batch_data is None else batch_data["input_ids"].shape[1]))
    plugin.megatron_lm_default_args.update(
        zip(names, sizes, strict=True),
        seq_length=plugin.seq_length,
        return_logits=plugin.return_logits,
        tokenizer_type=tokenizer,
        model_type_name="gpt",
        pretraining_flag=True,
        orig_vocab_size=config.vocab_size,
        model_return_dict=config.return_dict,
    )


# Hugging Face's name: what reads the sizes of a model, by its type.
MODEL_CONFIGS_TO_MEGATRON_PARSERS = MappingProxyType({"gpt2": parse_gpt2_config, "llama": parse_llama_config})

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
