"""The strategy of a world."""

from __future__ import annotations

from typing import Any

from accelerate_nb.config.did_you_mean import did_you_mean
from accelerate_nb.errors import ConfigurationError, NotYetError
from accelerate_nb.runtime.compat.kwargs_handlers import DistributedDataParallelKwargs
from accelerate_nb.runtime.strategies.base import Strategy
from accelerate_nb.runtime.strategies.ddp import DDP
from accelerate_nb.runtime.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
from accelerate_nb.runtime.strategies.xla_ddp import XlaDDP
from accelerate_nb.runtime.strategies.xla_spmd import XlaSPMD
from accelerate_nb.runtime.world.mesh import Mesh
from accelerate_nb.runtime.world.registry import use_mesh
from accelerate_nb.runtime.world.world import World
from accelerate_nb.runtime.xla.mesh_plan import XlaMesh

# Strategies by the names that `Accelerator(strategy=...)` takes.
NAMES = ("ddp", "fsdp", "tp")


def choose_strategy(
    world: World,
    requested: Strategy | type[Strategy] | str | None = None,
    mesh: Mesh | None = None,
    ddp: DistributedDataParallelKwargs | None = None,
    xla_mesh: XlaMesh | None = None,
    fsdp: FullyShardedDataParallelPlugin | None = None,
) -> Strategy:
    """
    The strategy that was requested, as an object, by a name or as a class that takes the world, or the one that suits the world.

    That is FSDP where it has a plugin, or the mesh shards weights, copies on XLA devices, or parts over a mesh of them, copies
    where there are several processes, else the process alone.
    Its world is spread over the requested mesh, or along the strategy's first axis. `NotYetError` for a mesh with axes along which
    the strategy can't spread a training.
    """
    if requested is None or isinstance(requested, str):
        strategy = _suitable(world, requested or _name(mesh, fsdp), ddp, xla_mesh, fsdp)
    else:
        strategy = _made(world, requested)
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


def _name(mesh: Mesh | None, fsdp: FullyShardedDataParallelPlugin | None) -> str:
    if fsdp is not None or (mesh is not None and mesh.dp_shard > 1):
        return "fsdp"
    return "tp" if mesh is not None and mesh.tp > 1 else "ddp"


def _suitable(
    world: World,
    name: str,
    ddp: DistributedDataParallelKwargs | None,
    xla_mesh: XlaMesh | None,
    fsdp: FullyShardedDataParallelPlugin | None,
) -> Strategy:
    if name not in NAMES:
        known = f"Pass {', '.join(map(repr, NAMES))}, or an object or a class below accelerate_nb.Strategy."
        raise ConfigurationError(
            f"strategy={name!r} was requested. {did_you_mean(name, NAMES)} {known}".replace("  ", " ")
        )
    if name == "fsdp":
        return _sharded(world, fsdp)
    if name == "tp":
        # not before it is used: it takes half a second to load
        from accelerate_nb.runtime.strategies.tensor_parallel import TensorParallel

        return TensorParallel(world)
    if fsdp is not None:
        raise ConfigurationError(f"strategy={name!r} was requested with an fsdp_plugin. Leave one of them out.")
    if world.device.type == "xla":
        return XlaDDP(world, ddp) if xla_mesh is None or xla_mesh.axes is None else XlaSPMD(world, xla_mesh)
    return DDP(world, ddp) if world.size > 1 else Strategy(world)


def _sharded(world: World, plugin: FullyShardedDataParallelPlugin | None) -> Strategy:
    if not isinstance(plugin, FullyShardedDataParallelPlugin | None):
        raise ConfigurationError(
            f"`fsdp_plugin` must be a FullyShardedDataParallelPlugin object, but is {plugin!r}. Pass one, or strategy='fsdp'."
        )
    if world.device.type == "xla":
        raise ConfigurationError(
            "FSDP was requested for XLA devices, where a mesh shards weights: pass XlaMesh('fsdp') in kwargs_handlers, or "
            "xla_mesh='fsdp' to the launcher."
        )
    # not before it is used: it takes half a second to load
    from accelerate_nb.runtime.strategies.fsdp.strategy import FSDP

    return FSDP(world, plugin)
