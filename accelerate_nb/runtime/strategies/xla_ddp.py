"""A full copy of the model on every XLA device; gradients are averaged before the optimizer steps."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.checkpoints.writer import in_groups
from accelerate_nb.runtime.compat.dataclasses import DistributedDataParallelKwargs
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.precision.registry import PrecisionOptions
from accelerate_nb.runtime.strategies.base import Strategy, has_places
from accelerate_nb.runtime.training.accumulation import GradientState
from accelerate_nb.runtime.training.unwrap import extract_model_from_parallel
from accelerate_nb.runtime.world.world import World
from accelerate_nb.runtime.xla import device as xla
from accelerate_nb.runtime.xla.collectives import AveragedModel
from accelerate_nb.runtime.xla.loader import sent
from accelerate_nb.user_warnings import warn_user

# What of `DistributedDataParallel` has a meaning where it does not do the averaging.
_WITH_EFFECT = ("find_unused_parameters", "broadcast_buffers")
_CHUNK = 64 * 2**20


class XlaDDP(Strategy):
    """A full copy of the model on every XLA device; gradients are averaged before the optimizer steps."""

    # a device's work waits until xla.sync, before a prepared loader's next batch and after a step without one

    axes = ("dp_replicate",)

    def __init__(self, world: World, options: DistributedDataParallelKwargs | None = None) -> None:
        super().__init__(world)
        self.options = options or DistributedDataParallelKwargs()
        if options is not None and world.is_main:
            left = sorted(set(options.to_kwargs()) - set(_WITH_EFFECT))
            if options.comm_hook != type(options)().comm_hook:
                left.append("comm_hook")
            if left:
                warn_user(
                    f"DistributedDataParallelKwargs has {', '.join(left)}, which means nothing on XLA devices: gradients are "
                    "averaged inside the compiled step. Leave it out there."
                )
        self._gradients = GradientState()
        self._models: dict[int, AveragedModel] = {}
        self._stepped_in: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    @property
    def between_batches(self) -> Callable[[], None]:
        """The device begins with its pending work."""
        return xla.sync

    @property
    def sender(self) -> Callable[[Any], Any]:
        """The function that sends a batch to this rank's device at once, from any thread."""
        return lambda batch: sent(batch, self.world.device)

    def settle(self) -> None:
        """Have the device begin with its pending work."""
        xla.sync()

    def place(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device; its weights stay the objects that they are, so ties and optimizers hold."""
        if has_places(model):
            return model
        for item in {id(parameter): parameter for parameter in chain(model.parameters(), model.buffers())}.values():
            if item.device != self.world.device:
                _move(item, self.world.device)
        return super().place(model)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """The same model, with the first rank's weights and buffers, whose gradients are averaged from now on."""
        if self.world.size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        begin_equal([*model.parameters(), *model.buffers()], self.world)
        self._models[id(model)] = AveragedModel(
            model,
            self.world,
            self._mean,
            share=self._first if self.options.broadcast_buffers else None,
            finds_unused=self.options.find_unused_parameters,
        )
        return model

    def choose_precision(self, name: str, options: PrecisionOptions) -> Precision:
        """The precision of a name; `ConfigurationError` for those in which torch_xla's devices don't compute."""
        if name in {"fp16", "fp8"}:
            raise ConfigurationError(
                f"mixed_precision={name!r} was requested, but torch_xla's devices compute in float32 and bfloat16: nothing "
                "there scales losses or counts in 8 bits. Use mixed_precision='bf16'."
            )
        return super().choose_precision(name, options)

    def compute_gradients(self, loss: Tensor, **options: Any) -> None:
        """The backward of a loss; where gradients are not held, they are averages when this returns."""
        super().compute_gradients(loss, **options)
        for model in self._models.values():
            model.settle(after_backward=True)

    def hold_gradients(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A block whose backwards keep their gradients to this rank."""
        averaged = self._averaged(model)
        return nullcontext() if averaged is None else averaged.holding()

    def send_gradients(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A block whose backward averages gradients, the held ones too."""
        averaged = self._averaged(model)
        return nullcontext() if averaged is None else averaged.sending()

    def clip_norm(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        """Scale averaged gradients down to a norm; the norm that they had stays on the device until it is read."""
        self._average()
        return super().clip_norm(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Cut each averaged gradient at a value."""
        self._average()
        super().clip_value(parameters, clip_value)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Let an optimizer step, with the averages of what a plain `loss.backward()` has left."""
        self._average()
        if self.world.size > 1 and not any(model.is_held for model in self._models.values()):
            # those of weights that are in no prepared model
            known = {id(parameter) for averaged in self._models.values() for parameter in averaged.parameters}
            weights = [item for group in optimizer.param_groups for item in group["params"] if id(item) not in known]
            self._mean([item.grad for item in weights if item.grad is not None])
        has_stepped = super().step(optimizer, closure)
        # the device begins, unless the loader that is being read will have it begin before its next batch
        batch = self._gradients.batch
        if batch is None or self._stepped_in.get(optimizer) == batch:
            xla.sync()
        self._stepped_in[optimizer] = batch
        return has_stepped

    def unshared(self, models: Sequence[Any], learning: Sequence[Tensor]) -> list[str]:
        """Warnings about weights that are in no prepared model: their gradients are averaged, and they began apart."""
        known = {id(parameter) for averaged in self._models.values() for parameter in averaged.parameters}
        if self.world.size == 1 or any(id(item) in known for item in learning):
            return []
        text = (
            "The optimizer's weights are in no prepared model: their gradients are averaged, but each of the "
            f"{self.world.size} ranks began with weights of its own. Give the model to accelerator.prepare(...), too."
        )
        return [text]

    def join_uneven(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """`ConfigurationError` where there are several ranks: a device without a batch can't join the others' collectives."""
        if self.world.size == 1:
            return nullcontext()
        raise ConfigurationError(
            "join_uneven_inputs was requested, but XLA devices compute the same program on all ranks, so each needs as many "
            "batches as the others. Leave even_batches=True, or give the loader drop_last=True."
        )

    def release(self) -> None:
        """Release what was prepared."""
        super().release()
        for model in self._models.values():
            model.release()
        self._models.clear()

    def close(self) -> None:
        """The training is over."""
        self.release()

    def _average(self) -> None:
        for model in self._models.values():
            model.settle()

    def _mean(self, gradients: Sequence[Tensor]) -> None:
        if xla.are_connected():
            xla.average_in_place(gradients)
            return
        # ranks on XLA's CPU backend know no other device: the step is cut in two, and the mean goes through the hosts
        if gradients:
            xla.sync()
        for chunk in _chunks(gradients):
            values = [item.detach().cpu() for item in chunk]
            packed = torch.cat([item.reshape(-1).float() for item in values])
            self.world.group.allreduce([packed]).wait()
            parts = packed.div_(self.world.size).split([item.numel() for item in values])
            for gradient, part in zip(chunk, parts, strict=True):
                gradient.data = part.view(gradient.shape).to(gradient.dtype).to(gradient.device)

    def _first(self, buffers: Sequence[Tensor]) -> None:
        """Replace buffers by the first rank's values."""
        if not xla.are_connected():
            begin_equal(buffers, self.world)
            return
        is_first = xla.as_data(torch.tensor(self.world.is_main), self.world.device)
        for buffer in buffers:
            # a sum has no truth values; what is no number elsewhere has no part in it
            number = buffer.detach().int() if buffer.dtype == torch.bool else buffer.detach()
            buffer.data = xla.reduced(torch.where(is_first, number, torch.zeros_like(number)), "sum").to(buffer.dtype)

    def _averaged(self, model: nn.Module) -> AveragedModel | None:
        return self._models.get(id(extract_model_from_parallel(model, keep_torch_compile=False)))


def _move(tensor: Tensor, device: torch.device) -> None:
    """Bring a weight or a buffer to a device as the object that it is, which Python's other names for it see, too."""
    gradient, tensor.grad = tensor.grad, None
    moved = tensor.detach().to(device)
    try:
        torch.utils.swap_tensors(
            tensor, nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
        )
    except RuntimeError as error:
        raise ConfigurationError(
            f"prepare was to bring a model to {device}, but a weight of shape {tuple(tensor.shape)} is in use ({error}). "
            "Prepare the model before it is called, hooked or compiled, or build it on accelerator.device."
        ) from error
    if gradient is not None:
        tensor.grad = gradient.to(device)


def begin_equal(tensors: Sequence[Tensor], world: World) -> None:
    """Give tensors the values that they have on the first rank, through the hosts: nothing is compiled for it."""
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    if any(item.device.type == "xla" for item in unique):
        xla.sync()
    for chunk in _chunks(unique):
        values = [
            item.detach().cpu().contiguous() if world.is_main else torch.empty(item.shape, dtype=item.dtype)
            for item in chunk
        ]
        packed = torch.cat([item.reshape(-1).view(torch.uint8) for item in values])
        world.group.broadcast([packed]).wait()
        # the first rank, too: tensors that came to be in another way make another program of the first step
        for item, part in zip(chunk, packed.split([value.nbytes for value in values]), strict=True):
            item.data = part.clone().view(item.dtype).view(item.shape).to(item.device)


def _chunks(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    return in_groups(tensors, lambda tensor: tensor.nbytes, _CHUNK)
