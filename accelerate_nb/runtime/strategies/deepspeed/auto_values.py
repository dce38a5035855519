"""The values that take the place of "auto" in DeepSpeed's configuration, which are Accelerate's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Module

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.deepspeed.optimizers import DummyOptim, DummyScheduler
from accelerate_nb.runtime.strategies.deepspeed.plugin import DeepSpeedPlugin
from accelerate_nb.runtime.strategies.prepare_request import PrepareCall
from accelerate_nb.user_warnings import warn_user

_MICRO_BATCH = "train_micro_batch_size_per_gpu"
# Sizes in numbers of weights, as parts of what a layer has.
_OF_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    "zero_optimization.reduce_bucket_size": lambda size: size * size,
    "zero_optimization.stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    "zero_optimization.stage3_param_persistence_threshold": lambda size: 10 * size,
}


def micro_batch_size(plugin: DeepSpeedPlugin, call: PrepareCall) -> Any:
    """
    The number of samples of a process in a micro-step: the configuration's, or the loaders' of this call of `prepare`.

    Of several loaders it is the smallest, or the largest with `is_train_batch_min=False`. `ConfigurationError` where there is none.
    """
    if not plugin.is_auto(_MICRO_BATCH):
        return plugin.get_value(_MICRO_BATCH)
    loaders = call.loaders
    sizes = [size for loader in loaders if (size := _samples_of(loader, call)) is not None]
    if not sizes or len(sizes) < len(loaders):
        found = "a loader without a batch_size" if loaders else "no loader"
        raise ConfigurationError(
            f"{_MICRO_BATCH} is 'auto' in DeepSpeed's configuration, and this call of prepare has {found}. Give `prepare` a "
            "loader with a batch_size together with the model, or write the number in the configuration: "
            f"AcceleratorState().deepspeed_plugin.deepspeed_config[{_MICRO_BATCH!r}] = 8."
        )
    return min(sizes) if plugin.is_train_batch_min else max(sizes)


def _samples_of(loader: Any, call: PrepareCall) -> int | None:
    """The number of samples that a process gets of a loader at once."""
    # one that is prepared already says what all processes get
    together = getattr(loader, "step_size", loader.batch_size if call.split_batches else None)
    return loader.batch_size if together is None else int(together) // call.streams_of(loader)


def choose_accumulation(plugin: DeepSpeedPlugin, steps: int) -> int:
    """The number of micro-steps in a step: the configuration's, or `steps`, which are the `Accelerator`'s, for "auto"."""
    key = "gradient_accumulation_steps"
    plugin.fill_match(key, must_match=False, gradient_accumulation_steps=steps)
    found = int(plugin.get_value(key))
    if found != steps:
        warn_user(
            f"The Accelerator has {key}={steps}, and DeepSpeed's configuration {found}, which holds. Write 'auto' in the "
            "configuration, or give both the same number."
        )
    return found


def fill_in(plugin: DeepSpeedPlugin, call: PrepareCall, model: Module, optimizer: Any, scheduler: Any) -> None:
    """Replace all that is "auto", but the number of micro-steps, which `choose_accumulation` has filled in."""
    values: dict[str, Any] = {
        "gradient_clipping": 1.0,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    }
    samples = micro_batch_size(plugin, call)
    if samples is not None:
        values[_MICRO_BATCH] = samples
        steps = plugin.get_value("gradient_accumulation_steps")
        values["train_batch_size"] = samples * steps * call.replicas
    values |= _of_hidden_size(plugin, model)
    if isinstance(optimizer, DummyOptim):
        values |= {"optimizer.params.lr": optimizer.lr, "optimizer.params.weight_decay": optimizer.weight_decay}
    if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is None:
        values |= _of_schedule(scheduler, call)
    plugin.deepspeed_config_process(must_match=False, **values)
    if call.sequence_parts > 1 and samples is not None:
        # transformers' Trainer has written the number for processes that share no sequences
        plugin.deepspeed_config["train_batch_size"] = values["train_batch_size"]


def _of_hidden_size(plugin: DeepSpeedPlugin, model: Module) -> dict[str, Any]:
    wanted = [key for key in _OF_HIDDEN_SIZE if plugin.is_auto(key)]
    if not wanted:
        return {}
    config = getattr(model, "config", None)
    size = getattr(config, "hidden_size", None) or max(getattr(config, "hidden_sizes", None) or [0])
    if not size:
        raise ConfigurationError(
            f"{', '.join(wanted)} is 'auto' in DeepSpeed's configuration, and is made of the model's config.hidden_size, which "
            f"{type(model).__name__} does not have. Write numbers there."
        )
    return {key: of_size(size) for key, of_size in _OF_HIDDEN_SIZE.items()}


def _of_schedule(scheduler: DummyScheduler, call: PrepareCall) -> dict[str, Any]:
    defaults = getattr(scheduler.optimizer, "defaults", None)
    found: dict[str, Any] = {
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": (
            getattr(scheduler.optimizer, "lr", None) if defaults is None else defaults["lr"]
        ),
        # DeepSpeed refuses 0
        "scheduler.params.warmup_num_steps": max(1, scheduler.warmup_num_steps),
    }
    if (steps := scheduler.total_num_steps) is not None:
        found["scheduler.params.total_num_steps"] = steps if call.split_batches else math.ceil(steps / call.replicas)
    return found


def check_pair(config: dict[str, Any], optimizer: Any, scheduler: Any, schedules: Sequence[str]) -> None:
    """Raise `ConfigurationError` where optimizer or schedule are in the configuration and in the code, or in neither."""
    is_placeholder = isinstance(optimizer, DummyOptim)
    if optimizer is not None and ("optimizer" in config) != is_placeholder:
        raise ConfigurationError(
            "An optimizer was made in the code, and DeepSpeed's configuration names one, too. Take it out of the configuration, or "
            "pass accelerate_nb.utils.DummyOptim(model.parameters()) instead."
            if "optimizer" in config
            else "A DummyOptim was given to prepare, and DeepSpeed's configuration names no optimizer. Write one there, or pass one "
            "of torch's."
        )
    if scheduler is None:
        return
    is_empty = isinstance(scheduler, DummyScheduler)
    if "scheduler" in config and not is_empty:
        raise ConfigurationError(
            "A schedule was made in the code, and DeepSpeed's configuration names one, too. Take it out of the configuration, or "
            "pass accelerate_nb.utils.DummyScheduler(optimizer) instead."
        )
    if is_empty and "scheduler" not in config and scheduler.lr_scheduler_callable is None:
        raise ConfigurationError(
            "A DummyScheduler was given to prepare, and DeepSpeed's configuration names no schedule. Write one there "
            f"({', '.join(schedules)}), or pass lr_scheduler_callable=."
        )
    if is_placeholder and not is_empty:
        raise ConfigurationError(
            f"A {type(scheduler).__name__} was given to prepare together with a DummyOptim, for which there is no optimizer to "
            "schedule yet. Pass accelerate_nb.utils.DummyScheduler(optimizer, lr_scheduler_callable=...)."
        )
