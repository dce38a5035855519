"""Optimizers and schedules under Accelerate's names: placeholders of what the configuration names, and what prepare returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelerate_nb.runtime.strategies.engine_objects import EngineOptimizer, EngineSchedule, Placeholder


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


class DeepSpeedEngineWrapper:
    """A DeepSpeed engine whose backward makes the step, too, where gradients are synchronised, as Accelerate has it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

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
