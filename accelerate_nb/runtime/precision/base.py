"""The precision of a step: the model's own by default, or 16 bits by autocast, with loss scaling for float16."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn import Module
from torch.optim import Optimizer

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.dataclasses import AutocastKwargs, GradScalerKwargs, PrecisionType
from accelerate_nb.runtime.operations.nested import convert_to_fp32


class Precision:
    """The model's own precision."""

    name: str = "no"
    scaler: torch.amp.GradScaler | None = None

    def wrap_forward(self, model: Module) -> Module:
        """The model, computing in this precision from now on, whatever it computed in before."""
        restore_forward(model)
        return model

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A block in which operations choose this precision."""
        return nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as it goes into the backward."""
        return loss

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Bring gradients back to their true size, before something reads them."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Let the optimizer step; returns whether it did."""
        optimizer.step(closure)
        return True

    def reset(self, optimizer: Optimizer) -> None:
        """The gradients of an optimizer were thrown away."""

    def release(self) -> None:
        """Forget every optimizer."""


def precision_name(requested: str | PrecisionType | None) -> str:
    """The name of a precision that exists; an unknown one is an error that lists the known ones."""
    name = "no" if requested is None else str(requested).lower()
    if name not in PrecisionType:
        raise ConfigurationError(
            f"mixed_precision={name!r} is not known. Choose one of {', '.join(map(repr, PrecisionType.list()))}."
        )
    return name


def replace_forward(model: Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Put a function around a model's forward, and return the former one."""
    forward = model.forward
    # bound again, not closed over, so that a deep copy of the model calls the copy
    model.forward = MethodType(around(forward.__func__), model) if isinstance(forward, MethodType) else around(forward)
    return forward


def restore_forward(model: Module) -> None:
    """Give a model its own forward back, if `wrap_forward` replaced it."""
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    if getattr(original, "__func__", None) is type(model).forward:
        model.__dict__.pop("forward", None)
    else:
        model.forward = original


class BF16(Precision):
    """Operations compute in bfloat16, whose range is that of float32: nothing needs to be scaled."""

    name = "bf16"
    dtype: torch.dtype = torch.bfloat16

    def __init__(self, device: torch.device, options: AutocastKwargs | None = None) -> None:
        self.device = device
        self.options = options or AutocastKwargs()
        self._check()

    def _check(self) -> None:
        if self.device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ConfigurationError(
                f"mixed_precision='bf16' was requested, but {torch.cuda.get_device_name(self.device)} can't compute in it. "
                "Use mixed_precision='fp16' there."
            )

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A block in which operations choose this type; `options` stand before those of the `Accelerator`."""
        chosen = options or self.options
        return torch.autocast(
            self.device.type, dtype=self.dtype, enabled=chosen.enabled, cache_enabled=chosen.cache_enabled
        )

    def wrap_forward(self, model: Module) -> Module:
        """The model with a forward that computes in this type and returns float32."""
        model = super().wrap_forward(model)
        model._original_forward = replace_forward(model, self._mixed)
        return model

    def _mixed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def mixed(*args: Any, **kwargs: Any) -> Any:
            with self.autocast():
                outputs = forward(*args, **kwargs)
            return convert_to_fp32(outputs)

        return mixed


class FP16(BF16):
    """Operations compute in float16, whose range is small: the loss is scaled up, and a step that overflows is left out."""

    name = "fp16"
    dtype = torch.float16

    def __init__(
        self, device: torch.device, options: AutocastKwargs | None = None, scaling: GradScalerKwargs | None = None
    ) -> None:
        super().__init__(device, options)
        # `None` once an `Accelerator` is given that
        self.scaler = MixedLayoutGradScaler(device.type, **(scaling or GradScalerKwargs()).to_kwargs())
        self._unscaled: dict[int, Optimizer] = {}

    def _check(self) -> None:
        """Every device that autocast knows computes in float16."""

    def scale(self, loss: Tensor) -> Tensor:
        if self.scaler is None:
            return loss
        for optimizer in list(self._unscaled.values()):
            # the backward adds scaled gradients to these; an overflow must not be forgotten, whatever clipping made of it
            factor = math.inf if _overflows(self.scaler, optimizer) else self.scaler.get_scale()
            for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
                if weight.grad is not None:
                    weight.grad.mul_(factor)
            self.reset(optimizer)
        return self.scaler.scale(loss)

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients of these optimizers by the factor, once between two backwards."""
        if self.scaler is None or not self.scaler.is_enabled():
            return
        for optimizer in optimizers:
            if id(optimizer) not in self._unscaled:
                self.scaler.unscale_(optimizer)
                self._unscaled[id(optimizer)] = optimizer

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Step unless a gradient overflowed, then adapt the factor; returns whether the optimizer stepped."""
        if self.scaler is None:
            return super().step(optimizer, closure)
        try:
            has_stepped = scaled_step(self.scaler, optimizer, closure)
        except BaseException:
            if self.scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:
                self._unscaled[id(optimizer)] = optimizer  # the next backward adds to these gradients
            raise
        if not self.scaler.is_enabled():
            return has_stepped
        self._unscaled.pop(id(optimizer), None)
        # The scaler's update forgets what was unscaled, also for an optimizer that has its step still before it.
        waiting = {key: state for key, state in self.scaler._per_optimizer_states.items() if key in self._unscaled}
        self.scaler.update()
        self.scaler._per_optimizer_states.update(waiting)
        return has_stepped

    def reset(self, optimizer: Optimizer) -> None:
        """New gradients will be scaled ones."""
        if self.scaler is not None and self.scaler.is_enabled():
            self._unscaled.pop(id(optimizer), None)
            self.scaler._per_optimizer_states.pop(id(optimizer), None)

    def release(self) -> None:
        self._unscaled.clear()
        if self.scaler is not None:
            self.scaler._per_optimizer_states.clear()  # its keys are ids, which other optimizers may get


def scaled_step(scaler: torch.amp.GradScaler, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
    """Step through a scaler, which leaves the step out if a gradient overflowed; returns whether the optimizer stepped."""
    calls: list[None] = []
    with _noting_steps(optimizer, calls):
        scaler.step(optimizer, closure)
    if calls and scaler.is_enabled() and getattr(optimizer, "_step_supports_amp_scaling", False):
        # one that is called whatever overflowed, as fused ones are, changed no weight for that reason
        return not _overflows(scaler, optimizer)
    return bool(calls)


def _overflows(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Whether a gradient of an optimizer overflowed, as far as the scaler has looked at it."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(overflow.item() for overflow in found.values())


@contextmanager
def _noting_steps(optimizer: Optimizer, calls: list[None]) -> Iterator[None]:
    """A block in which each call of an optimizer's `step` is noted: the scaler decides inside whether it calls it."""
    step = optimizer.step
    replaced = optimizer.__dict__.get("step")  # a learning-rate scheduler puts its own there

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return step(*args, **kwargs)

    optimizer.step = noted  # type: ignore[method-assign]  # for the length of the block
    try:
        yield
    finally:
        if replaced is None:
            del optimizer.__dict__["step"]
        else:
            optimizer.step = replaced  # type: ignore[method-assign]  # as it was


class MixedLayoutGradScaler(torch.amp.GradScaler):
    """A gradient scaler for optimizers whose weights have several layouts: plain tensors, and DTensors along any mesh."""

    # It is called with a number that is above 0 where a gradient of this process overflows, and makes it so on all that step together.
    share_overflow: Callable[[Tensor], None] | None = None

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # the weights that have gradients, by their layouts: torch's own scaler takes the first one's for that of all, and refuses plain
        # tensors beside DTensors (`found_inf_reduce_handler` in torch/distributed/tensor/_dispatch.py, torch 2.13)
        by_layout: dict[Any, list[Tensor]] = {}
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            if weight.grad is not None:
                placements = getattr(weight.grad, "placements", None)
                layout = None if placements is None else (weight.grad.device_mesh, placements)
                by_layout.setdefault(layout, []).append(weight)
        found: dict[torch.device, Tensor] = {}
        for weights in by_layout.values():
            part: Any = SimpleNamespace(param_groups=[{"params": weights}])
            overflows = super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16)
            for device, overflow in overflows.items():
                found[device] = found[device] + overflow if device in found else overflow
        if self.share_overflow is not None:
            # a process whose weights have no gradients shares what others found, too
            for overflow in (found or {inv_scale.device: found_inf}).values():
                self.share_overflow(overflow)
        return found or {inv_scale.device: found_inf}
