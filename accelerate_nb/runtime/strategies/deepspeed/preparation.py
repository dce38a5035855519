"""DeepSpeed as this process loads it, and what an engine is prepared of: optimizers, schedules, values in the place of "auto"."""

import fcntl
import functools
import logging
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accelerate_nb.errors import ConfigurationError, MissingExtraError
from accelerate_nb.runtime.compat.packages import is_deepspeed_available
from accelerate_nb.runtime.strategies.base import Placeholder, PrepareCall
from accelerate_nb.runtime.strategies.deepspeed.plugin import DeepSpeedPlugin
from accelerate_nb.runtime.training.optimizer import EngineOptimizer, EngineSchedule
from accelerate_nb.runtime.world.registry import at_world_exit, be_a_group
from accelerate_nb.runtime.world.world import World
from accelerate_nb.user_warnings import warn_user

# What `accelerate.utils.deepspeed` offers.
__all__ = [
    "DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper", "DummyOptim", "DummyScheduler",
    "map_pytorch_optim_to_deepspeed",
]  # fmt: skip


class DummyOptim(Placeholder):
    """
    A placeholder of the optimizer that DeepSpeed's configuration names.

    `lr` and `weight_decay` take the place of "auto" in `optimizer.params`; what DeepSpeed makes stands in its place after `prepare`.

    >>> DummyOptim([], lr=3e-4).lr
    0.0003
    """

    made_by = "DeepSpeed"

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler(Placeholder):
    """
    A placeholder of the schedule that DeepSpeed's configuration names, or that `lr_scheduler_callable(optimizer)` makes.

    `total_num_steps` and `warmup_num_steps` take the place of "auto" in `scheduler.params`.
    """

    made_by = "DeepSpeed"

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


@dataclass(eq=False)
class DeepSpeedEngineWrapper:
    """A DeepSpeed engine whose backward makes the step, too, where gradients are synchronised, as Accelerate has it."""

    engine: Any

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients, and step with `sync_gradients`."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> Any:
        """The norm of all gradients in the last step, a number; `None` before it."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, Tensor) else norm


class DeepSpeedOptimizerWrapper(EngineOptimizer):
    """An optimizer that DeepSpeed's engine steps; by itself it does nothing."""

    skips = "overflow"


class DeepSpeedSchedulerWrapper(EngineSchedule):
    """A schedule that DeepSpeed's engine moves; its own `step` does nothing."""


def map_pytorch_optim_to_deepspeed(optimizer: Optimizer) -> Any:
    """DeepSpeed's optimizer for host memory in the place of one of torch's, or of bitsandbytes': Adagrad, Lion, or else Adam."""
    defaults = {name: value for name, value in optimizer.defaults.items() if name in {"lr", "weight_decay"}}
    names = {found.__name__ for found in type(optimizer).__mro__ if found.__module__.startswith("bitsandbytes")}
    is_32_bits = getattr(optimizer, "optim_bits", getattr(getattr(optimizer, "args", None), "optim_bits", None)) == 32
    if isinstance(optimizer, torch.optim.Adagrad) or ({"Adagrad", "Adagrad32bit"} & names and is_32_bits):
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        return DeepSpeedCPUAdagrad(optimizer.param_groups, **defaults)
    if {"Lion", "Lion32bit"} & names and is_32_bits:
        from deepspeed.ops.lion import DeepSpeedCPULion

        return DeepSpeedCPULion(optimizer.param_groups, **defaults)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    is_adamw = isinstance(optimizer, torch.optim.AdamW) or bool({"AdamW", "AdamW32bit"} & names and is_32_bits)
    # Accelerate passes it to all of them, though Adam alone takes it
    return DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=is_adamw, **defaults)


# The values in the place of "auto"

_MICRO_BATCH = "train_micro_batch_size_per_gpu"
# Sizes in numbers of weights, as parts of what a layer has.
_OF_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    "zero_optimization.reduce_bucket_size": lambda size: size * size,
    "zero_optimization.stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    "zero_optimization.stage3_param_persistence_threshold": lambda size: 10 * size,
}


def micro_batch_size(plugin: DeepSpeedPlugin, call: PrepareCall) -> Any:
    """A process's samples in a micro-step: the configuration's, or the loaders', the largest without `is_train_batch_min`."""
    if not plugin.is_auto(_MICRO_BATCH):
        return plugin.get_value(_MICRO_BATCH)
    loaders = [item for item in call.objects if hasattr(item, "batch_size")]
    sizes: list[int] = []
    for loader in loaders:
        # one that is prepared already says what all processes get at once
        together = getattr(loader, "step_size", loader.batch_size if call.split_batches else None)
        streams = call.processes if getattr(loader, "more_axes", ()) else call.replicas
        size = loader.batch_size if together is None else int(together) // streams
        if size is not None:
            sizes.append(size)
    if not sizes or len(sizes) < len(loaders):
        found = "a loader without a batch_size" if loaders else "no loader"
        raise ConfigurationError(
            f"{_MICRO_BATCH} is 'auto' in DeepSpeed's configuration, and this call of prepare has {found}. Give `prepare` a "
            "loader with a batch_size together with the model, or write the number in the configuration: "
            f"AcceleratorState().deepspeed_plugin.deepspeed_config[{_MICRO_BATCH!r}] = 8."
        )
    return min(sizes) if plugin.is_train_batch_min else max(sizes)


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


def fill_in(plugin: DeepSpeedPlugin, call: PrepareCall, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
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


def _of_hidden_size(plugin: DeepSpeedPlugin, model: nn.Module) -> dict[str, Any]:
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


_CHOSEN = "DS_ACCELERATOR"
# What its logger warns of at every start: an optimizer other than Adam, which a person has given to prepare, and that a schedule
# asks itself for its first learning rate.
_NO_NEWS = ("ZeRO with an untested optimizer", "learning rate from scheduler before it has started")


def load_package(world: World) -> ModuleType:
    """The package, for devices of this world's type, whose collectives go over torch's process group."""
    if not is_deepspeed_available():
        raise MissingExtraError(
            "Training with DeepSpeed was requested, and the package is not installed: pip install 'accelerate-nb[deepspeed]'"
        )
    # else it takes the CPU for a machine's GPU wherever it finds one
    os.environ.setdefault(_CHOSEN, world.device.type)
    # DeepSpeed reads its place from torchrun's variables, which no launcher may have set
    for name, value in (("LOCAL_RANK", world.local_rank), ("RANK", world.rank), ("WORLD_SIZE", world.size)):
        os.environ.setdefault(name, str(value))
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator().device_name()
    if found != world.device.type:
        raise ConfigurationError(
            f"The training is on {world.device.type}, but DeepSpeed was imported for {found} ({_CHOSEN}="
            f"{os.environ.get(_CHOSEN)}). Make the Accelerator before DeepSpeed is imported, or set {_CHOSEN}={world.device.type}."
        )
    _prepare_builds()
    level = logging.getLevelName(os.environ.get("ACCELERATE_LOG_LEVEL", "").upper())
    logger = logging.getLogger("DeepSpeed")
    # its handler has a level of its own
    speakers: list[Any] = [logger, *logger.handlers]
    for speaker in speakers:
        speaker.setLevel(level if isinstance(level, int) else logging.WARNING)
    # a named function, of which a logger takes one, however many worlds load the package
    logger.addFilter(_is_news)
    # DeepSpeed's own calls, at every gathering of weights; who trains with it can't change them
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    # it is for inference alone, and would be compiled inside of the launch
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        be_a_group(world)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
    at_world_exit(_forget_groups)
    return deepspeed  # type: ignore[no-any-return]  # the package has no types


def _prepare_builds() -> None:
    """Have DeepSpeed compile operators one process at a time, with a ninja beside this Python, past marks that killed builds left."""
    # torch marks a folder with a file while it builds, and waits for ever for one that a killed process has left behind
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils import cpp_extension

    build = OpBuilder.jit_load
    if hasattr(build, "__wrapped__"):
        return
    beside = str(Path(sys.executable).parent)
    if shutil.which("ninja") is None and shutil.which("ninja", path=beside) is not None:
        os.environ["PATH"] = os.pathsep.join(filter(None, [os.environ.get("PATH"), beside]))

    @functools.wraps(build)
    def alone(builder: Any, verbose: bool = True) -> Any:
        folder = Path(cpp_extension._get_build_directory(builder.name, verbose=False))
        with open(folder / ".building", "w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_open(folder / "lock"):
                (folder / "lock").unlink(missing_ok=True)
            return build(builder, verbose)

    OpBuilder.jit_load = alone


def _is_open(path: Path) -> bool:
    """Whether a process of this user has a file open, as a build has its mark."""
    target = str(path.resolve())
    opened = (process.info["open_files"] or () for process in psutil.process_iter(["open_files"]))
    return any(file.path == target for files in opened for file in files)


def _is_news(record: logging.LogRecord) -> bool:
    return not any(text in str(record.msg) for text in _NO_NEWS)


def _forget_groups() -> None:
    """Have DeepSpeed make its groups anew in the next world; what it keeps of them would outlive them."""
    from deepspeed.utils import groups

    release = getattr(groups, "_release_process_group_references", None)
    if release is not None:
        release()
    else:  # before DeepSpeed 0.19
        groups._WORLD_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = groups.mpu = groups.mesh_device = None
