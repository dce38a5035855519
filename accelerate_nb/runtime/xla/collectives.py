"""How tensors reach other ranks inside the programs of their devices."""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from accelerate_nb.runtime import xla
from accelerate_nb.runtime.operations.exchange import Call, agree
from accelerate_nb.runtime.operations.moving import OF_ROWS, Mover
from accelerate_nb.runtime.operations.nested import leaves_of


class InPrograms(Mover):
    """
    Tensors on XLA devices, which move when the program runs that they are part of.

    Ranks agree over their hosts before anything of it is written, so that calls which don't fit together are an error and no
    program that waits for ever. Nothing is computed for it. A program has to be the same on all ranks: who a rank is comes
    into it as data.
    """

    def gather(self, call: Call, leaves: list[Tensor]) -> list[Tensor]:
        agree(self.world, call)
        return [self._rows(leaf).flatten(0, 1) if leaf.ndim else self._rows(leaf) for leaf in leaves]

    def reduce(self, call: Call, leaves: list[Tensor], reduction: str, scale: float) -> list[Tensor]:
        agree(self.world, call)
        return [self._reduced(leaf.detach(), reduction, scale) for leaf in leaves]

    def broadcast(self, call: Call, leaves: list[Tensor], source: int) -> list[Tensor]:
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
        at_home = Mover(self.world.at_home)
        return at_home.send(leaf, source, shape, dtype).to(self.world.device)

    def packed(self, thing: Any) -> bytes:
        file = BytesIO()
        packer = _Packer(file)
        packer.bring([leaf for leaf in leaves_of(thing) if isinstance(leaf, Tensor)])
        packer.dump(thing)
        return file.getvalue()

    def _rows(self, leaf: Tensor) -> Tensor:
        """What every rank has: `(ranks, *shape)`."""
        if not leaf.numel():
            return leaf.new_empty((self.world.size, *leaf.shape))
        return xla.gathered(leaf.detach().unsqueeze(0))

    def _reduced(self, leaf: Tensor, reduction: str, scale: float) -> Tensor:
        if not leaf.numel():
            return leaf.clone()
        if leaf.is_complex() and reduction in ("max", "min"):
            return OF_ROWS[reduction](self._rows(leaf))
        return xla.reduced(leaf, "sum" if reduction == "mean" else reduction, scale)


class _Packer(pickle.Pickler):
    """Packs tensors of XLA devices as tensors on the CPU: one rank's device may not be there on another."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self._brought: dict[int, Tensor] = {}

    def bring(self, tensors: list[Tensor]) -> None:
        """Bring several tensors from the device at once."""
        on_device = [each for each in tensors if each.device.type == "xla"]
        brought: list[Tensor] = xla.to_cpu([each.detach() for each in on_device])
        self._brought.update((id(each), copy) for each, copy in zip(on_device, brought, strict=True))

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or obj.device.type != "xla":
            return NotImplemented
        at_home = self._brought.get(id(obj))
        return (obj.detach().cpu() if at_home is None else at_home).__reduce_ex__(pickle.DEFAULT_PROTOCOL)
