"""The transfer of tensors on XLA devices to other ranks: inside the devices' programs, or between their hosts."""

import pickle
from collections.abc import Callable
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from accelerate_nb.runtime.operations.call_check import CollectiveCall, agree
from accelerate_nb.runtime.operations.nested import leaves_of
from accelerate_nb.runtime.operations.transfer import TensorMover, combined
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
