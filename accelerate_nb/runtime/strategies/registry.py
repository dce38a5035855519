"""Which strategy a world calls for."""

from __future__ import annotations

from accelerate_nb.runtime.handlers import DistributedDataParallelKwargs
from accelerate_nb.runtime.sharding.plan import XlaMesh
from accelerate_nb.runtime.strategies.base import Strategy
from accelerate_nb.runtime.strategies.ddp import DDP
from accelerate_nb.runtime.strategies.spmd import Spmd
from accelerate_nb.runtime.strategies.xla import Replicas
from accelerate_nb.runtime.world import World


def choose_strategy(
    world: World, ddp: DistributedDataParallelKwargs | None = None, mesh: XlaMesh | None = None
) -> Strategy:
    """Copies on XLA devices, or parts over a mesh of them, data parallel where there are several processes, else the process alone."""
    if world.device.type == "xla":
        return Replicas(world, ddp) if mesh is None or mesh.axes is None else Spmd(world, mesh)
    return DDP(world, ddp) if world.size > 1 else Strategy(world)
