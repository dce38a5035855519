"""The loaders, optimizers and schedules of an engine under Accelerate's names, and the placeholders of them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate_nb.errors import ConfigurationError, DataError
from accelerate_nb.runtime.strategies.megatron.engine.arguments import get_args
from accelerate_nb.runtime.strategies.placeholder import Placeholder
from accelerate_nb.runtime.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer that its engine steps when it is called; its own `step` only notes that a step was made."""

    def __init__(self, optimizer: Any, device_placement: bool = False, *args: Any, **kwargs: Any) -> None:
        # Megatron has placed what the optimizer remembers
        super().__init__(optimizer, False, *args, **kwargs)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the engine left its last step out because a gradient overflowed."""
        return bool(getattr(self.optimizer, "skipped_iter", False))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as Accelerate's
        """Nothing is left to do: `model(**batch)` has made the step."""
        if self._strategy is not None:
            super().step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing: the engine throws gradients away before it computes new ones."""


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


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """A schedule that its engine moves when it steps; its own `step` does nothing."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        # without the notice that it moves once for every process
        super().__init__(scheduler, optimizers, split_batches=True)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine moves it when it steps."""

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
    loader = DataLoader(
        dataset,
        batch_sampler=_Batches(steps, size, index, replicas, consumed // (size * replicas) % steps),
        num_workers=getattr(args, "num_workers", 0),
        pin_memory=device.type == "cuda",
    )
    while True:
        for batch in loader:
            yield send_to_device(batch, device)
        loader.batch_sampler.first = 0  # type: ignore[union-attr]  # the one above


class _Batches:
    """The indices of one copy's batches in the order of the data set, from the `first` step on."""

    def __init__(self, steps: int, size: int, index: int, replicas: int, first: int) -> None:
        self.steps, self.size, self.index, self.replicas, self.first = steps, size, index, replicas, first

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first, self.steps):
            start = (step * self.replicas + self.index) * self.size
            yield list(range(start, start + self.size))

    def __len__(self) -> int:
        return self.steps - self.first


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
