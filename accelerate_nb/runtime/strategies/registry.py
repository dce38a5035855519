"""The strategy of a world."""

from dataclasses import dataclass
from typing import Any

from accelerate_nb.config.options.megatron import MegatronLMPlugin
from accelerate_nb.config.value_types import did_you_mean
from accelerate_nb.errors import ConfigurationError, MissingExtraError, NotYetError
from accelerate_nb.runtime.compat.dataclasses import DistributedDataParallelKwargs
from accelerate_nb.runtime.compat.packages import is_installed
from accelerate_nb.runtime.parallelism_config import ParallelismConfig
from accelerate_nb.runtime.strategies.base import Strategy
from accelerate_nb.runtime.strategies.ddp import DDP
from accelerate_nb.runtime.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
from accelerate_nb.runtime.strategies.xla_ddp import XlaDDP
from accelerate_nb.runtime.world.registry import use_mesh
from accelerate_nb.runtime.world.world import Mesh, World

# Strategies by the names that `Accelerator(strategy=...)` takes.
NAMES = ("ddp", "fsdp", "tp", "pp", "deepspeed", "megatron")


@dataclass(frozen=True, slots=True)
class StrategyRequest:
    """A strategy that was requested as an object, by a name or as a class that takes the world; a mesh; and options of strategies."""

    strategy: Strategy | type[Strategy] | str | None = None
    parallelism: ParallelismConfig | None = None
    ddp: DistributedDataParallelKwargs | None = None
    fsdp: FullyShardedDataParallelPlugin | None = None
    deepspeed: Any = None
    megatron: MegatronLMPlugin | None = None

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that was requested; a configuration without degrees requests none."""
        found = None if self.parallelism is None else self.parallelism.mesh
        return found if found is not None and found.degrees else None


def choose_strategy(world: World, request: StrategyRequest) -> Strategy:
    """The strategy that was requested, or that suits the plugins and the world, spread over the requested mesh or its first axis."""
    strategy = _build(world, request)
    used = (request.mesh or strategy.default_mesh).checked(world.size)
    other = {axis: degree for axis, degree in used.degrees.items() if axis not in strategy.axes}
    if "sp" in other:
        raise ConfigurationError(
            f"sp_size={other['sp']} was requested, but DeepSpeed alone splits sequences so, and the training is by "
            f"{type(strategy).__name__}. Pass deepspeed_plugin=DeepSpeedPlugin() or strategy='deepspeed', or cp_size for torch's split."
        )
    if request.mesh is not None and other:
        text = ", ".join(f"{axis}={degree}" for axis, degree in other.items())
        raise NotYetError(
            f"{text} was requested, but {type(strategy).__name__} spreads a training along {' and '.join(strategy.axes) or 'no axis'} "
            "alone, and no other strategy is offered here yet. Leave these degrees out."
        )
    strategy.world = use_mesh(used)
    if request.parallelism is not None:
        strategy.use_parallelism(request.parallelism)
    return strategy


def _build(world: World, request: StrategyRequest) -> Strategy:
    requested = request.strategy
    if request.deepspeed is not None and request.megatron is not None:
        raise ConfigurationError("DeepSpeed and Megatron were requested together. Pass one plugin of them.")
    for title in ("DeepSpeed", "Megatron"):
        name = title.lower()
        if requested == name or getattr(request, name) is not None:
            if requested not in (None, name) or request.fsdp is not None:
                other = f"strategy={requested!r}" if request.fsdp is None else "an fsdp_plugin"
                raise ConfigurationError(f"{title} was requested with {other}. Leave one of them out.")
            requested = name
    if requested is not None and not isinstance(requested, str):
        found = requested(world) if isinstance(requested, type) and issubclass(requested, Strategy) else requested
        if not isinstance(found, Strategy):
            raise ConfigurationError(
                f"strategy={requested!r} was requested, but a strategy is an object or a class below accelerate_nb.Strategy. Leave it "
                "out for the one that suits the run."
            )
        return found
    name = requested or _suitable_name(request)
    if name not in NAMES:
        known = f"Pass {', '.join(map(repr, NAMES))}, or an object or a class below accelerate_nb.Strategy."
        raise ConfigurationError(
            f"strategy={name!r} was requested. {did_you_mean(name, NAMES)} {known}".replace("  ", " ")
        )
    _check(name, world, request)
    return _made(name, world, request)


def _suitable_name(request: StrategyRequest) -> str:
    mesh = request.mesh or Mesh()
    if mesh.pp > 1:
        return "pp"
    if request.fsdp is not None or mesh.dp_shard > 1:
        return "fsdp"
    return "tp" if mesh.tp > 1 else "ddp"


def _check(name: str, world: World, request: StrategyRequest) -> None:
    """Raise a `ConfigurationError` for a plugin of another type, and for devices on which a strategy can't train."""
    plugins = {
        "fsdp": ("fsdp_plugin", request.fsdp, FullyShardedDataParallelPlugin),
        "megatron": ("megatron_lm_plugin", request.megatron, MegatronLMPlugin),
    }
    if name in plugins:
        argument, plugin, wanted = plugins[name]
        if not isinstance(plugin, wanted | None):
            raise ConfigurationError(
                f"`{argument}` must be a {wanted.__name__} object, but is {plugin!r}. Pass one, or strategy={name!r}."
            )
    titles = {"fsdp": "FSDP", "deepspeed": "DeepSpeed"}
    if name in titles and world.device.type == "xla":
        raise ConfigurationError(
            f"{titles[name]} was requested for XLA devices, which it doesn't know. Leave it out, so that each rank has the whole "
            "model, or train on GPUs."
        )


def _made(name: str, world: World, request: StrategyRequest) -> Strategy:
    """The strategy of a name; its module is imported here, since it takes half a second to load, or a package that may not be there."""
    if name == "fsdp":
        from accelerate_nb.runtime.strategies.fsdp.strategy import FSDP

        return FSDP(world, request.fsdp)
    if name == "tp":
        from accelerate_nb.runtime.strategies.tensor_parallel import TensorParallel

        return TensorParallel(world)
    if name == "pp":
        from accelerate_nb.runtime.strategies.pipeline.strategy import PipelineParallel

        return PipelineParallel(world, request.fsdp)
    if name == "deepspeed":
        from accelerate_nb.runtime.strategies.deepspeed.strategy import DeepSpeed

        return DeepSpeed(world, request.deepspeed)
    if name == "megatron":
        if not is_installed("megatron", "megatron-core"):
            raise MissingExtraError(
                "Megatron needs the package megatron-core, which is not installed: pip install 'accelerate-nb[megatron]'"
            )
        from accelerate_nb.runtime.strategies.megatron.strategy import MegatronParallel

        return MegatronParallel(world, request.megatron)
    if request.fsdp is not None:
        raise ConfigurationError("strategy='ddp' was requested with an fsdp_plugin. Leave one of them out.")
    if world.device.type == "xla":
        return XlaDDP(world, request.ddp)
    return DDP(world, request.ddp) if world.size > 1 else Strategy(world)
