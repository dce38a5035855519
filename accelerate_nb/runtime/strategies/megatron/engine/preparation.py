"""The model, the optimizer and the schedule of an engine, made of a transformers model, a torch optimizer and a plugin's settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.data.adapter import loader_arguments
from accelerate_nb.runtime.strategies.megatron.engine.arguments import get_args
from accelerate_nb.runtime.strategies.megatron.engine.datasets import MegatronLMDummyDataLoader
from accelerate_nb.runtime.strategies.megatron.engine.model_provider import build, chunks, innermost
from accelerate_nb.runtime.strategies.megatron.model_checks import check


def prepare_model_optimizer_scheduler(accelerator: Any) -> tuple[list[Any], Optimizer | None, Any]:
    """
    The parts of a model on this process as Megatron trains them, its optimizer and its schedule, as the arguments describe them.

    The plugin's `custom_model_provider_function(pre_process, post_process)` builds a part where there is one, and its
    `custom_prepare_model_function(provider)` all parts. Without `train_iters` or `train_samples` there is no schedule.
    """
    plugin = accelerator.state.megatron_lm_plugin
    provider = plugin.custom_model_provider_function
    if plugin.custom_prepare_model_function is None:
        parts = chunks(build if provider is None else provider)
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
