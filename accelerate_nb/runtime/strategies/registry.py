"""The strategy of a world."""

from __future__ import annotations

from typing import Any

from accelerate_nb.config.value_types import did_you_mean
from accelerate_nb.errors import ConfigurationError, MissingExtraError, NotYetError
from accelerate_nb.runtime.compat.kwargs_handlers import DistributedDataParallelKwargs
from accelerate_nb.runtime.compat.packages import is_installed
from accelerate_nb.runtime.strategies.base import Strategy
from accelerate_nb.runtime.strategies.ddp import DDP
from accelerate_nb.runtime.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
from accelerate_nb.runtime.strategies.megatron.plugin import MegatronLMPlugin
from accelerate_nb.runtime.strategies.xla_ddp import XlaDDP
from accelerate_nb.runtime.world.mesh import Mesh
from accelerate_nb.runtime.world.registry import use_mesh
from accelerate_nb.runtime.world.world import World

# Strategies by the names that `Accelerator(strategy=...)` takes.
NAMES = ("ddp", "fsdp", "tp", "pp", "deepspeed", "megatron")


def choose_strategy(
    world: World,
    requested: Strategy | type[Strategy] | str | None = None,
    mesh: Mesh | None = None,
    ddp: DistributedDataParallelKwargs | None = None,
    fsdp: FullyShardedDataParallelPlugin | None = None,
    deepspeed: Any = None,
    megatron: MegatronLMPlugin | None = None,
) -> Strategy:
    """
    The strategy that was requested, as an object, by a name or as a class that takes the world, or the one that suits the world.

    That is DeepSpeed, Megatron or FSDP where it has a plugin, or the mesh shards weights, copies on XLA devices and where there are several processes, else the process alone.
    Its world is spread over the requested mesh, or along the strategy's first axis. `NotYetError` for a mesh with axes along which
    the strategy can't spread a training.
    """
    if deepspeed is not None and megatron is not None:
        raise ConfigurationError("DeepSpeed and Megatron were requested together. Pass one plugin of them.")
    if deepspeed is not None or requested == "deepspeed":
        strategy = _by_deepspeed(world, requested, deepspeed, fsdp)
    elif megatron is not None or requested == "megatron":
        strategy = _by_megatron(world, requested, megatron, fsdp)
    elif requested is None or isinstance(requested, str):
        strategy = _suitable(world, requested or _name(mesh, fsdp), ddp, fsdp)
    else:
        strategy = _made(world, requested)
    used = (mesh or strategy.default_mesh).checked(world.size)
    other = {axis: degree for axis, degree in used.degrees.items() if axis not in strategy.axes}
    if "sp" in other:
        raise ConfigurationError(
            f"sp_size={other['sp']} was requested, but DeepSpeed alone splits sequences so, and the training is by "
            f"{type(strategy).__name__}. Pass deepspeed_plugin=DeepSpeedPlugin() or strategy='deepspeed', or cp_size for torch's split."
        )
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
    if mesh is not None and mesh.pp > 1:
        return "pp"
    if fsdp is not None or (mesh is not None and mesh.dp_shard > 1):
        return "fsdp"
    return "tp" if mesh is not None and mesh.tp > 1 else "ddp"


def _suitable(
    world: World,
    name: str,
    ddp: DistributedDataParallelKwargs | None,
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
    if name == "pp":
        # as above
        from accelerate_nb.runtime.strategies.pipeline.strategy import PipelineParallel

        return PipelineParallel(world, fsdp)
    if fsdp is not None:
        raise ConfigurationError(f"strategy={name!r} was requested with an fsdp_plugin. Leave one of them out.")
    if world.device.type == "xla":
        return XlaDDP(world, ddp)
    return DDP(world, ddp) if world.size > 1 else Strategy(world)


def _by_deepspeed(world: World, requested: Any, plugins: Any, fsdp: FullyShardedDataParallelPlugin | None) -> Strategy:
    if requested not in {None, "deepspeed"} or fsdp is not None:
        other = f"strategy={requested!r}" if fsdp is None else "an fsdp_plugin"
        raise ConfigurationError(f"DeepSpeed was requested with {other}. Leave one of them out.")
    if world.device.type == "xla":
        raise ConfigurationError(
            "DeepSpeed was requested for XLA devices, which it does not know. Train with DDP there."
        )
    # not before it is used: the package may not be there
    from accelerate_nb.runtime.strategies.deepspeed.strategy import DeepSpeed

    return DeepSpeed(world, plugins)


def _by_megatron(
    world: World, requested: Any, plugin: MegatronLMPlugin | None, fsdp: FullyShardedDataParallelPlugin | None
) -> Strategy:
    if not isinstance(plugin, MegatronLMPlugin | None):
        raise ConfigurationError(
            f"`megatron_lm_plugin` must be a MegatronLMPlugin object, but is {plugin!r}. Pass one, or strategy='megatron'."
        )
    if requested not in (None, "megatron") or fsdp is not None:
        other = f"strategy={requested!r}" if fsdp is None else "an fsdp_plugin"
        raise ConfigurationError(f"Megatron was requested with {other}. Leave one of them out.")
    if not is_installed("megatron", "megatron-core"):
        raise MissingExtraError(
            "Megatron needs the package megatron-core, which is not installed: pip install 'accelerate-nb[megatron]'"
        )
    # not before it is used: the package may not be there
    from accelerate_nb.runtime.strategies.megatron.strategy import MegatronParallel

    return MegatronParallel(world, plugin)


def _sharded(world: World, plugin: FullyShardedDataParallelPlugin | None) -> Strategy:
    if not isinstance(plugin, FullyShardedDataParallelPlugin | None):
        raise ConfigurationError(
            f"`fsdp_plugin` must be a FullyShardedDataParallelPlugin object, but is {plugin!r}. Pass one, or strategy='fsdp'."
        )
    if world.device.type == "xla":
        raise ConfigurationError(
            "FSDP was requested for XLA devices, which torch's FSDP doesn't know. Leave it out, so that each rank has the whole "
            "model, or train on GPUs."
        )
    # not before it is used: it takes half a second to load
    from accelerate_nb.runtime.strategies.fsdp.strategy import FSDP

    return FSDP(world, plugin)
