"""The gradients of a model that are averaged over the ranks, so that all ranks give their devices the same work."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.world.world import World

# an in-place operation on tensors, by all ranks together
Together = Callable[[Sequence[Tensor]], None]


class AveragedModel:
    """A model of which every rank has a copy, and whose gradients are averaged by `average`."""

    # A device's work must be the same on all ranks, also where a weight was used on some of them only. Which weights get gradients is
    # agreed on in the first step, or with `finds_unused` in every one; those of them that got none enter as zeros, as with DDP. Buffers
    # that the model has changed get the first rank's values by `share` whenever gradients are averaged; DDP's at the next forward.

    def __init__(
        self,
        model: Module,
        world: World,
        average: Together,
        *,
        share: Together | None = None,
        finds_unused: bool = False,
    ) -> None:
        self.world = world
        self.finds_unused = finds_unused
        self._average = average
        self._share = share
        self._model = ref(model)
        self._parameters = dict(model.named_parameters())
        self._buffers = {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}
        self._changing: set[str] = set()
        self._touched: set[int] = set()
        self._holds = 0
        self._sends = 0
        self._used: dict[tuple[int, ...], set[int]] = {}
        self._hooks: dict[int, Any] = {}
        self._watch(self._learning())

    @property
    def parameters(self) -> list[Parameter]:
        return list(self._parameters.values())

    @property
    def is_held(self) -> bool:
        """Whether gradients stay on their rank for now."""
        return self._holds > 0 and self._sends == 0

    @contextmanager
    def holding(self) -> Iterator[None]:
        """A block whose gradients stay on their rank."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    @contextmanager
    def sending(self) -> Iterator[None]:
        """A block whose gradients are averaged, although it stands in one that holds them."""
        self._sends += 1
        try:
            yield
        finally:
            self._sends -= 1

    def settle(self, *, after_backward: bool = False) -> None:
        """Average what has got gradients since the last time, unless it is held."""
        if self.is_held:
            return
        learning = self._learning()
        self._watch(learning)
        touched = {id(item) for item in learning if id(item) in self._touched and item.grad is not None}
        self._touched.clear()
        if not touched and not (after_backward and self.finds_unused):
            return
        used = self._agreed(learning, touched)
        gradients: list[Tensor] = []
        for item in learning:
            if id(item) in used:
                item.grad = torch.zeros_like(item) if item.grad is None else item.grad
                gradients.append(item.grad)
        if gradients:
            self._average(gradients)
        if self._share is not None and (changed := self._changed()):
            self._share(changed)

    def release(self) -> None:
        """Take no notice of gradients any more."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _changed(self) -> list[Tensor]:
        """The buffers of modules that have changed one of theirs; most never do, and need not be sent."""
        model = self._model()
        buffers = {} if model is None else dict(model.named_buffers())
        for name, buffer in buffers.items():
            if self._buffers.get(name) != (id(buffer), buffer._version):
                self._changing.add(_owner(name))
        return [item for name, item in buffers.items() if _owner(name) in self._changing]

    def _learning(self) -> list[Parameter]:
        return [parameter for parameter in self._parameters.values() if parameter.requires_grad]

    def _watch(self, learning: Sequence[Parameter]) -> None:
        """Take notice of gradients; weights may begin to learn after `prepare`."""
        weak_self = ref(self)  # a hook keeps nothing alive

        def note(parameter: Tensor) -> None:  # called by autograd's thread for the device
            if (averaged := weak_self()) is not None:
                averaged._touched.add(id(parameter))

        for item in learning:
            if id(item) not in self._hooks:
                if self._hooks and item.grad is not None:
                    self._touched.add(id(item))
                self._hooks[id(item)] = item.register_post_accumulate_grad_hook(note)

    def _agreed(self, learning: Sequence[Parameter], touched: set[int]) -> set[int]:
        """The weights that have gradients on some rank."""
        key = tuple(map(id, learning))
        if self.finds_unused or key not in self._used:
            bits = torch.tensor([id(item) in touched for item in learning], dtype=torch.uint8)
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
            self.world.group.allreduce([bits], options).wait()
            self._used[key] = {id(item) for item, bit in zip(learning, bits.tolist(), strict=True) if bit}
        used = self._used[key]
        if new := touched - used:
            raise ConfigurationError(
                f"{self._named(new)} had no gradient on any rank in the first step and has one now, but the ranks agree on "
                "what they exchange in the first step only. Pass "
                "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)], so that they agree in every step."
            )
        return used

    def _named(self, ids: set[int]) -> str:
        names = [name for name, parameter in self._parameters.items() if id(parameter) in ids]
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more weights"


def _owner(name: str) -> str:
    """The module that has a buffer: XLA's batch norm counts its batches in sight of torch, but not what it does to its means."""
    return name.rpartition(".")[0]
