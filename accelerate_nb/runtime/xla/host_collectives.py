"""The transfer of tensors to ranks that are threads of one process on XLA's CPU backend: computed first, then between hosts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from accelerate_nb.runtime.operations.call_check import CollectiveCall, agree
from accelerate_nb.runtime.operations.transfer import TensorMover
from accelerate_nb.runtime.xla.collectives import XlaMover


class XlaHostMover(XlaMover):
    """
    Tensors on XLA's CPU devices, whose ranks pass their steps together.

    There a collective may not stand in a program: whoever reads what comes of it (`item()`, `print`) has it computed at once,
    and by that rank alone, which XLA ends the process for after 10 seconds.
    """

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
