"""The base of strategies, which spread a step over processes; the default is one process that has everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from accelerate_nb.runtime.compat.enums import DistributedType
from accelerate_nb.runtime.strategies.device_placement import check_quantised, has_places
from accelerate_nb.runtime.training.compile import TorchDynamoPlugin
from accelerate_nb.runtime.training.unwrap import extract_model_from_parallel
from accelerate_nb.runtime.world.world import World


class Strategy:
    """One process has the whole model and sees all data."""

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def distributed_type(self) -> DistributedType:
        """Hugging Face's name of this way of distributing on these devices."""
        return DistributedType.of(self.world.size, self.world.device.type)

    @property
    def mesh(self) -> str:
        """The mesh of devices that one process drives, in words; empty where it drives one."""
        return ""

    @property
    def data_replicas(self) -> tuple[int, int]:
        """The index of this process's stream of batches, and the number of different streams."""
        return self.world.rank, self.world.size

    @property
    def sender(self) -> Callable[[Any], Any] | None:
        """The function that brings a batch to this process's devices, where a move is not enough."""
        return None

    @property
    def copies_are_whole(self) -> bool:
        """Whether every process holds all weights, so that it could train by itself for a while."""
        return True

    def prepare(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """The objects of one call of `prepare`, before each is prepared for itself."""
        return objects

    def accept(self, model: Module) -> None:
        """Raise a `ConfigurationError` for a model that can't be trained on the devices of its weights."""
        check_quantised(model, self.world.device)

    def place(self, model: Module) -> Module:
        """The model on this process's device, unless its weights were put on other devices."""
        return model if has_places(model) else model.to(self.world.device)

    def wrap_model(self, model: Module) -> Module:
        """The model as it is trained."""
        return model

    def compile(self, model: Module, how: TorchDynamoPlugin) -> Module:
        """The model as it is trained, compiled."""
        return how.compiled(model)

    def unwrap(self, model: Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False) -> Any:
        """The model before `prepare`, whose weights have their original names."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients."""
        loss.backward(**options)

    @property
    def between_batches(self) -> Callable[[], None] | None:
        """The function that a prepared loader calls before each batch and after the last; `None` for nothing."""
        return None

    def before_step(self, optimizer: Any) -> None:
        """An optimizer is going to step."""

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped."""

    def hold_gradients(self, model: Module) -> AbstractContextManager[Any]:
        """A block whose backwards keep their gradients to this process."""
        return nullcontext()

    def send_gradients(self, model: Module) -> AbstractContextManager[Any]:
        """A block whose backward exchanges gradients although the forward was run in `hold_gradients`."""
        return nullcontext()

    def clip_norm(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients down to a norm; returns the norm that they had."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_value(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Cut each gradient at a value."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def settle(self) -> None:
        """Have the device's part of the state computed before it is read, or after it was written; all processes call it."""

    def model_state(self, model: Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The model's complete weights, on the process that saves them."""
        state: dict[str, Any] = (self.unwrap(model) if unwrap else model).state_dict()
        return state

    def load_model_state(self, model: Module, state: dict[str, Any], **options: Any) -> Any:
        """Give a prepared model the weights that `model_state` returned."""
        return self.unwrap(model).load_state_dict(state, **options)

    def join_uneven(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """A block in which processes may have different numbers of batches."""
        return nullcontext()

    def unshared(self, models: Sequence[Any], learning: Sequence[Tensor]) -> list[str]:
        """Warnings about weights that learn and whose gradients are not shared as they should be; `models` are prepared."""
        return []

    def release(self) -> None:
        """Release what was prepared."""

    def close(self) -> None:
        """The training is over."""
