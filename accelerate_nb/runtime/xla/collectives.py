"""The transfer of tensors on XLA devices to other ranks, by the devices or their hosts; and gradients averaged over the ranks."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.operations.nested import leaves_of
from accelerate_nb.runtime.operations.transfer import CollectiveCall, TensorMover, agree, combined
from accelerate_nb.runtime.world.world import World
from accelerate_nb.runtime.xla import device as xla


class XlaMover(TensorMover):
    """Tensors on XLA devices, which move when the program runs that they are part of."""

    # Ranks agree over their hosts before anything of it is written, so that calls which don't fit together are an error and no program
    # that waits for ever. A program has to be the same on all ranks: who a rank is comes into it as data.

    def gather(self, call: CollectiveCall, leaves: list[Tensor]) -> list[Tensor]:
        agree(self.world, call)
        return [self._rows(leaf).flatten(0, 1) if leaf.ndim else self._rows(leaf) for leaf in leaves]

    def reduce(self, call: CollectiveCall, leaves: list[Tensor], reduction: str, scale: float) -> list[Tensor]:
        agree(self.world, call)
        return [self._reduced(leaf.detach(), reduction, scale) for leaf in leaves]

    def broadcast(self, call: CollectiveCall, leaves: list[Tensor], source: int) -> list[Tensor]:
        agree(self.world, call)
        sends = xla.as_data(torch.tensor([self.world.rank == source]), self.world.device)
        # all others add nothing
        return [
            self._reduced(torch.where(sends, leaf.detach(), torch.zeros_like(leaf)), "sum", 1.0).reshape(leaf.shape)
            for leaf in leaves
        ]

    def send(self, leaf: Tensor | None, source: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # one rank's program made it, so it leaves the devices, after all that they were to do together
        self.world.settle()
        host_mover = TensorMover(self.world.exchange_world)
        return host_mover.send(leaf, source, shape, dtype).to(self.world.device)

    def packed(self, value: Any) -> bytes:
        on_device = [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor) and leaf.device.type == "xla"]
        brought: list[Tensor] = xla.to_cpu([leaf.detach() for leaf in on_device])  # in one transfer
        file = BytesIO()
        _XlaPickler(file, dict(zip(map(id, on_device), brought, strict=True))).dump(value)
        return file.getvalue()

    def _rows(self, leaf: Tensor) -> Tensor:
        """The rows of every rank: `(ranks, *shape)`."""
        if not leaf.numel():
            return leaf.new_empty((self.world.size, *leaf.shape))
        return xla.gathered(leaf.detach().unsqueeze(0))

    def _reduced(self, leaf: Tensor, reduction: str, scale: float) -> Tensor:
        if not leaf.numel():
            return leaf.clone()
        if leaf.is_complex() and reduction in ("max", "min"):
            return combined(reduction, self._rows(leaf))
        return xla.reduced(leaf, "sum" if reduction == "mean" else reduction, scale)


class XlaHostMover(XlaMover):
    """Tensors on XLA's CPU devices, each of which knows of its own process alone: they are computed, then go from host to host."""

    def gather(self, call: CollectiveCall, leaves: list[Tensor]) -> list[Tensor]:
        return self._moved_on_hosts(call, leaves, lambda mover, brought: mover.gather(call, brought))

    def reduce(self, call: CollectiveCall, leaves: list[Tensor], reduction: str, scale: float) -> list[Tensor]:
        reduced = self._moved_on_hosts(
            call, leaves, lambda mover, brought: mover.reduce(call, brought, reduction, scale)
        )
        return reduced if scale == 1.0 else [item * scale for item in reduced]

    def broadcast(self, call: CollectiveCall, leaves: list[Tensor], source: int) -> list[Tensor]:
        return self._moved_on_hosts(call, leaves, lambda mover, brought: mover.broadcast(call, brought, source))

    def _moved_on_hosts(
        self, call: CollectiveCall, leaves: list[Tensor], move: Callable[[TensorMover, list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        # before any rank waits for the others to come to the same step
        agree(self.world, call)
        self.world.settle()
        moved = move(TensorMover(self.world.exchange_world), [leaf.detach().cpu() for leaf in leaves])
        return [item.to(self.world.device) for item in moved]


def mover_through(world: World) -> TensorMover:
    """The mover of tensors on XLA devices: inside their programs where these reach the other ranks."""
    return XlaMover(world) if xla.are_connected() else XlaHostMover(world)


class _XlaPickler(pickle.Pickler):
    """Packs tensors of XLA devices as tensors on the CPU: one rank's device may not be there on another."""

    def __init__(self, file: BytesIO, brought: dict[int, Tensor]) -> None:
        super().__init__(file)
        self._brought = brought

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or obj.device.type != "xla":
            return NotImplemented
        copied = self._brought.get(id(obj))
        return (obj.detach().cpu() if copied is None else copied).__reduce_ex__(pickle.DEFAULT_PROTOCOL)


# an in-place operation on tensors, by all ranks together
Together = Callable[[Sequence[Tensor]], None]


# ------------------------------------------------------------------------------------------------------------ gradients


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
