"""The strategy of a world."""

from __future__ import annotations

from accelerate_nb.runtime.compat.kwargs_handlers import DistributedDataParallelKwargs
from accelerate_nb.runtime.strategies.base import Strategy
from accelerate_nb.runtime.strategies.ddp import DDP
from accelerate_nb.runtime.strategies.xla_ddp import XlaDDP
from accelerate_nb.runtime.strategies.xla_spmd import XlaSPMD
from accelerate_nb.runtime.world.world import World
from accelerate_nb.runtime.xla.mesh_plan import XlaMesh


def choose_strategy(
    world: World, ddp: DistributedDataParallelKwargs | None = None, mesh: XlaMesh | None = None
) -> Strategy:
    """Copies on XLA devices, or parts over a mesh of them, data parallel where there are several processes, else the process alone."""
    if world.device.type == "xla":
        return XlaDDP(world, ddp) if mesh is None or mesh.axes is None else XlaSPMD(world, mesh)
    return DDP(world, ddp) if world.size > 1 else Strategy(world)
