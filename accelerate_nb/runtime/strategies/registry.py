"""The strategy of a world."""

from __future__ import annotations

from typing import Any

from accelerate_nb.errors import ConfigurationError, NotYetError
from accelerate_nb.runtime.compat.kwargs_handlers import DistributedDataParallelKwargs
from accelerate_nb.runtime.strategies.base import Strategy
from accelerate_nb.runtime.strategies.ddp import DDP
from accelerate_nb.runtime.strategies.xla_ddp import XlaDDP
from accelerate_nb.runtime.strategies.xla_spmd import XlaSPMD
from accelerate_nb.runtime.world.mesh import Mesh
from accelerate_nb.runtime.world.registry import use_mesh
from accelerate_nb.runtime.world.world import World
from accelerate_nb.runtime.xla.mesh_plan import XlaMesh


def choose_strategy(
    world: World,
    requested: Strategy | type[Strategy] | None = None,
    mesh: Mesh | None = None,
    ddp: DistributedDataParallelKwargs | None = None,
    xla_mesh: XlaMesh | None = None,
) -> Strategy:
    """
    The strategy that was requested, as an object or as a class that takes the world, or the one that suits the world.

    That is copies on XLA devices, or parts over a mesh of them, copies where there are several processes, else the process alone.
    Its world is spread over the requested mesh, or along the strategy's first axis. `NotYetError` for a mesh with axes along which
    the strategy can't spread a training.
    """
    strategy = _suitable(world, ddp, xla_mesh) if requested is None else _made(world, requested)
    used = (mesh or strategy.default_mesh).checked(world.size)
    other = {axis: degree for axis, degree in used.degrees.items() if axis not in strategy.axes}
    if mesh is not None and other:
        text = ", ".join(f"{axis}={degree}" for axis, degree in other.items())
        raise NotYetError(
            f"{text} was requested, but {type(strategy).__name__} spreads a training along {' and '.join(strategy.axes) or 'no axis'} "
            "alone, and no other strategy is offered here yet. Leave these degrees out."
        )
    strategy.world = use_mesh(used)
    return strategy


def _made(world: World, requested: Any) -> Strategy:
    found = requested(world) if isinstance(requested, type) and issubclass(requested, Strategy) else requested
    if not isinstance(found, Strategy):
        raise ConfigurationError(
            f"strategy={requested!r} was requested, but a strategy is an object or a class below accelerate_nb.Strategy. Leave it "
            "out for the one that suits the run."
        )
    return found


def _suitable(world: World, ddp: DistributedDataParallelKwargs | None, xla_mesh: XlaMesh | None) -> Strategy:
    if world.device.type == "xla":
        return XlaDDP(world, ddp) if xla_mesh is None or xla_mesh.axes is None else XlaSPMD(world, xla_mesh)
    return DDP(world, ddp) if world.size > 1 else Strategy(world)
