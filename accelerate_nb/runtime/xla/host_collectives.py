"""How tensors reach other ranks that are threads of one process on XLA's CPU backend: computed first, then between hosts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from accelerate_nb.runtime.operations.exchange import Call, agree
from accelerate_nb.runtime.operations.moving import Mover
from accelerate_nb.runtime.operations.programs import InPrograms


class ThroughHosts(InPrograms):
    """
    Tensors on XLA's CPU devices, whose ranks pass their steps together.

    There a collective may not stand in a program: whoever reads what comes of it (`item()`, `print`) has it computed at once,
    and by that rank alone, which XLA ends the process for after 10 seconds.
    """

    def gather(self, call: Call, leaves: list[Tensor]) -> list[Tensor]:
        return self._moved_at_home(call, leaves, lambda home, brought: home.gather(call, brought))

    def reduce(self, call: Call, leaves: list[Tensor], reduction: str, scale: float) -> list[Tensor]:
        reduced = self._moved_at_home(call, leaves, lambda home, brought: home.reduce(call, brought, reduction, scale))
        return reduced if scale == 1.0 else [each * scale for each in reduced]

    def broadcast(self, call: Call, leaves: list[Tensor], source: int) -> list[Tensor]:
        return self._moved_at_home(call, leaves, lambda home, brought: home.broadcast(call, brought, source))

    def _moved_at_home(
        self, call: Call, leaves: list[Tensor], move: Callable[[Mover, list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        # before any rank waits for the others to come to the same step
        agree(self.world, call)
        self.world.settle()
        moved = move(Mover(self.world.at_home), [leaf.detach().cpu() for leaf in leaves])
        return [each.to(self.world.device) for each in moved]
