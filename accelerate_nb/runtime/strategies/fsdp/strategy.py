"""The strategy that shards a training's states with torch's `fully_shard` (FSDP2), and Accelerate's functions for it."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.dataclasses import DistributedType
from accelerate_nb.runtime.parallelism_config import ParallelismConfig
from accelerate_nb.runtime.precision.base import BF16
from accelerate_nb.runtime.strategies.base import PrepareRequest
from accelerate_nb.runtime.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
from accelerate_nb.runtime.strategies.sharded import InitialWeights, ShardedStrategy, shared_weights
from accelerate_nb.runtime.strategies.tensor_parallel import LayerSplitter
from accelerate_nb.runtime.training.compile import TorchDynamoPlugin, compile_regions_in_place, is_repeated_blocks
from accelerate_nb.runtime.world.registry import be_a_group
from accelerate_nb.runtime.world.world import Mesh, World

# What `accelerate.utils.fsdp_utils` offers.
__all__ = [
    "fsdp2_apply_ac", "fsdp2_canonicalize_names", "fsdp2_load_full_state_dict", "fsdp2_prepare_auto_wrap_policy",
    "fsdp2_prepare_model", "fsdp2_switch_optimizer_parameters", "get_fsdp2_grad_scaler", "get_parameters_from_modules",
]  # fmt: skip

CHECKPOINTED = "_checkpoint_wrapped_module"


class FSDP(ShardedStrategy):
    """Every process has a part of each weight, its gradient and the optimizer's state; `dp_replicate` copies of the parts (HSDP)."""

    axes = ("dp_shard", "dp_replicate", "cp", "tp")
    is_fsdp2 = True
    distributed_type = DistributedType.FSDP

    def __init__(self, world: World, plugin: FullyShardedDataParallelPlugin | None = None) -> None:
        super().__init__(world)
        self.fsdp_plugin = plugin or FullyShardedDataParallelPlugin(fsdp_version=2)
        if self.fsdp_plugin.mixed_precision_policy is self.fsdp_plugin.policy_of_precision:
            # of an Accelerator before this one, whose precision may be another
            self.fsdp_plugin.mixed_precision_policy = None
        self._shard_mesh: DeviceMesh | None = None
        self._splitter = LayerSplitter()
        # by model, whether its backwards send gradients
        self._is_sent = WeakIdKeyDictionary()

    @property
    def default_mesh(self) -> Mesh:
        """Parts over all ranks, or, as version 1's hybrid sharding has it, over those of a machine, with copies on each machine."""
        shards = self.world.local_size if self.fsdp_plugin.hybrid_shard else self.world.size
        return Mesh(dp_replicate=self.world.size // shards, dp_shard=shards)

    @property
    def writes_parts(self) -> bool:
        """Whether the plugin requests parts, rather than complete files."""
        return bool(self.fsdp_plugin.writes_parts)

    def use_parallelism(self, config: ParallelismConfig) -> None:
        """Shard along the configuration's mesh, and split layers along it where it says so."""
        super().use_parallelism(config)
        self._splitter = LayerSplitter(config.tp_handler)

    # Preparing

    def prepare_model(self, request: PrepareRequest) -> nn.Module:
        """Shard a model block by block, with the first process's weights on all; only a block at a time is whole on the device."""
        model: nn.Module = request.value
        if isinstance(model, FSDPModule):
            return model
        self.accept(model)
        if not request.is_trained:
            return super().prepare_model(request)
        if not self.world.is_main:
            # that an output should not be written to in place is said once, by the main process
            warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        ignored = self.ignored(model)
        self.attend_over_parts(model)
        self._shard(model, self.blocks(model), ignored)
        return self.compile(model, request.compiling)

    def ignored(self, model: nn.Module) -> set[nn.Parameter]:
        """The weights that stay whole; `ConfigurationError` where another one can't be sharded."""
        found = ignored_weights(model, self.fsdp_plugin.ignored_modules)
        numbers = [name for name, weight in model.named_parameters() if weight.ndim == 0 and weight not in found]
        if numbers:
            raise ConfigurationError(
                f"The model's {', '.join(numbers)} should be sharded, but has no dimension along which it could be cut. Make it a "
                "tensor of one element, `torch.zeros(1)` for `torch.tensor(0.0)`, or freeze it and name its module in "
                "`ignored_modules`."
            )
        return found

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The modules that are sharded each for itself, which recompute their activations where the plugin requests it."""
        found = blocks_of(model, self.fsdp_plugin)
        if self.fsdp_plugin.activation_checkpointing:
            found = checkpoint_activations(model, found, offload=self.fsdp_plugin.activation_checkpointing_offload)
        return found

    def initialise(self, model: nn.Module) -> Callable[[nn.Module], object] | None:
        """The function that gives a module of the model its first weights: the plugin's, or that which models of transformers have."""
        return self.fsdp_plugin.param_init_fn or getattr(model, "_init_weights", None)

    def _shard(self, model: nn.Module, blocks: Sequence[nn.Module], ignored: set[nn.Parameter]) -> None:
        plugin, options = self.fsdp_plugin, self.shard_options(model)
        weights = InitialWeights(self.world, self.initialise(model), ignored)
        if self.world.mesh.tp > 1:
            if self.device_mesh is None or self.world.mesh.dp_shard * self.world.mesh.cp == 1:
                raise ConfigurationError(
                    f"FSDP was requested on {self.world.mesh}. Beside tp it shards along dp_shard: pass "
                    "ParallelismConfig(dp_shard_size=..., tp_size=...), or leave the plugin out to split layers alone."
                )
            self._splitter.split(model, self.device_mesh["tp"], weights)
        for block in blocks:
            weights.bring(block)
            fully_shard(
                block, reshard_after_forward=plugin.reshard_after_forward, ignored_params=weights.ignored, **options
            )
        weights.bring(model)
        # torch keeps the root's weights between forward and backward, which needs them first
        fully_shard(model, ignored_params=weights.ignored, **options)
        if plugin.reshard_after_forward:
            model.register_forward_hook(_reshard_without_backward)

    def shard_options(self, model: nn.Module) -> dict[str, Any]:
        """The arguments of `fully_shard` for all parts of a model, which from now on computes in the precision."""
        policy = self._mixed_precision(model)
        return {"mesh": self._mesh(), "mp_policy": policy, "offload_policy": self.fsdp_plugin.cpu_offload}

    def _mixed_precision(self, model: nn.Module) -> MixedPrecisionPolicy:
        """The plugin's policy, or the precision's: weights are gathered and gradients sent in its type, beside autocast."""
        plugin = self.fsdp_plugin
        self.precision.wrap_forward(model)
        if isinstance(self.precision, BF16):
            has_none = plugin.mixed_precision_policy is None
            plugin.set_mixed_precision(self.precision.name)
            if has_none:
                plugin.policy_of_precision = plugin.mixed_precision_policy
            for weight in model.parameters():
                if weight.requires_grad and weight.is_floating_point() and weight.dtype != torch.float32:
                    weight.data = weight.data.float()
        found = plugin.mixed_precision_policy
        if not isinstance(found, MixedPrecisionPolicy):
            return MixedPrecisionPolicy()
        # autocast chooses the types of inputs and outputs
        is_of_precision = found is plugin.policy_of_precision
        return replace(found, output_dtype=None, cast_forward_inputs=False) if is_of_precision else found

    def _mesh(self) -> DeviceMesh:
        """The mesh of shards, with that of copies before it, where there are any: of the configuration's mesh, or one of its own."""
        if self._shard_mesh is not None:
            return self._shard_mesh
        if not dist.is_initialized():
            be_a_group(self.world)
        degrees, mesh = self.world.mesh, self.device_mesh
        if mesh is None or degrees.dp_shard * degrees.cp == 1:
            shape = (degrees.pp, degrees.dp_replicate, degrees.dp_shard)
            mesh = init_device_mesh(self.world.device.type, shape, mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
        shards = [axis for axis in ("dp_shard", "cp") if axis in (mesh.mesh_dim_names or ())]
        if len(shards) == 2 and degrees.dp_replicate == 1:
            self._shard_mesh = mesh[tuple(shards)]._flatten("dp_shard_cp")
        else:
            shard = shards[0] if len(shards) == 1 else "dp_shard_cp"
            self._shard_mesh = mesh["dp_replicate", shard] if degrees.dp_replicate > 1 else mesh[shard]
        return self._shard_mesh

    def compile(self, model: nn.Module, how: TorchDynamoPlugin) -> nn.Module:
        """The model, compiled; blocks are compiled in place, since each of them gathers its weights."""
        if how.use_regional_compilation:
            return compile_regions_in_place(model, **how.to_kwargs())
        return super().compile(model, how)

    # A step

    @contextmanager
    def _gradient_sync(self, model: nn.Module, enabled: bool) -> Iterator[None]:
        sharded = self.unwrap(model)
        if not isinstance(sharded, FSDPModule):
            yield
            return
        before = self._is_sent.get(sharded, True)
        self._send(sharded, enabled)
        try:
            yield
        finally:
            self._send(sharded, before)

    def _send(self, sharded: FSDPModule, enabled: bool) -> None:
        self._is_sent[sharded] = enabled
        sharded.set_requires_gradient_sync(enabled)

    def hold_gradients(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A block whose backwards keep whole gradients on this process, and send nothing."""
        return self._gradient_sync(model, enabled=False)

    def send_gradients(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A block whose backward averages gradients, those that were held among them."""
        return self._gradient_sync(model, enabled=True)

    def unshared(self, models: Sequence[Any], learning: Sequence[Tensor]) -> list[str]:
        """A warning about weights that learn and are in no sharded model."""
        whole = sum(not isinstance(weight, DTensor) and weight.numel() > 0 for weight in learning)
        if not whole or self.world.size == 1:
            return []
        alone = f"{whole} of the optimizer's weights are not sharded, so each of the {self.world.size} processes trains its own"
        return [f"{alone}. Give their model to accelerator.prepare(...), too, or freeze what `ignored_modules` names."]

    def close(self) -> None:
        """The training is over."""
        super().close()
        self._splitter.close()


def _reshard_without_backward(model: Any, _inputs: Any, _outputs: Any) -> None:
    """Shard what the root keeps for a backward that does not come; an optimizer made then would get whole weights."""
    if not torch.is_grad_enabled():
        model.reshard()


# The parts of a model whose weights are gathered and freed together


def blocks_of(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """The modules that are sharded each for itself, the innermost first, without the model itself."""
    # one weight belongs to one part: a module that shares one with what is outside of it is left to the model, as is a list
    chosen = block_policy(model, plugin)
    shared = shared_weights(model)
    return [
        module
        for module in _bottom_up(model)
        if module is not model
        and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and chosen(inner(module))
        and not _shares_outside(module, shared)
    ]


def inner(module: nn.Module) -> nn.Module:
    """A module without the wrapper that recomputes its activations."""
    while (wrapped := module._modules.get(CHECKPOINTED)) is not None:
        module = wrapped
    return module


def block_policy(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> Callable[[nn.Module], bool]:
    """The function that says of a module whether it is one of these."""
    settings = copy(plugin)  # what it finds in this model is not for another
    settings.set_auto_wrap_policy(model)
    policy: Any = settings.auto_wrap_policy
    function = getattr(policy, "func", policy)
    if function is size_based_auto_wrap_policy:
        least = getattr(policy, "keywords", {}).get("min_num_params", settings.min_num_params or 0)
        return lambda module: _size(module) > least
    if function is transformer_auto_wrap_policy and (classes := tuple(policy.keywords["transformer_layer_cls"])):
        return lambda module: isinstance(module, classes)
    if policy is not None and function is not transformer_auto_wrap_policy:
        return lambda module: bool(policy(module=module, recurse=False, nonwrapped_numel=_size(module)))
    names = getattr(model, "_no_split_modules", None) or ()
    repeated = {id(block) for block in _repeated_blocks(model)}
    return lambda module: type(module).__name__ in names if names else id(module) in repeated


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of equal modules, of an `nn.Sequential` those with parts; what is in such an element is small."""
    parts = list(module.children())
    # the layers of an `nn.Sequential` may be called without it
    is_sequence = isinstance(module, nn.Sequential) and len(parts) > 1 and type(parts[0]) is not nn.Sequential
    is_repeated = is_sequence and all(type(part) is type(parts[0]) and part._modules for part in parts)
    if is_repeated or is_repeated_blocks(module):
        yield from parts
    else:
        for part in parts:
            yield from _repeated_blocks(part)


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _bottom_up(module: nn.Module) -> Iterator[nn.Module]:
    """A module's parts before the module itself, each once."""
    seen: set[int] = set()

    def walk(part: nn.Module) -> Iterator[nn.Module]:
        seen.add(id(part))
        for child in part.children():
            if id(child) not in seen:
                yield from walk(child)
        yield part

    return walk(module)


def _shares_outside(module: nn.Module, shared: dict[int, list[nn.Module]]) -> bool:
    inside = {id(part) for part in module.modules()}
    return any(id(owner) not in inside for weight in module.parameters() for owner in shared.get(id(weight), ()))


def ignored_weights(model: nn.Module, ignored: Iterable[nn.Module] | str | None) -> set[nn.Parameter]:
    """The weights that every process keeps whole: those of modules, or of a pattern of their names, and what has no numbers."""
    empty = {weight for weight in model.parameters() if weight.numel() == 0}
    if ignored is None:
        return empty
    if not isinstance(ignored, str):
        return empty | {weight for module in ignored for weight in module.parameters()}
    pattern = re.compile(ignored)
    found = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    if not found:
        raise ConfigurationError(
            f"ignored_modules={ignored!r} was requested, but no module's name matches it. Names are "
            f"{', '.join([name for name, _ in model.named_modules() if name][:8])}, …"
        )
    return empty.union(*(module.parameters() for module in found))


def checkpoint_activations(model: nn.Module, blocks: Sequence[nn.Module], *, offload: bool) -> list[nn.Module]:
    """Have blocks recompute activations in the backward, with `offload` from inputs on the CPU; returns the wrapped blocks."""
    wrapped = {id(block): checkpoint_wrapper(block, preserve_rng_state=True) for block in blocks}
    if offload:
        wrapped = {key: offload_wrapper(block) for key, block in wrapped.items()}
    for parent in list(model.modules()):
        # a block may have several names, of which `named_children` gives one
        for name, child in list(parent._modules.items()):
            if id(child) in wrapped and wrapped[id(child)] is not parent and not name.startswith("_checkpoint_wrapped"):
                setattr(parent, name, wrapped[id(child)])
    return [wrapped[id(block)] for block in blocks]


# ----------------------------------------------------------------------------------------------- Accelerate's functions


def fsdp2_prepare_model(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """The model, sharded in place as `accelerator.prepare` does."""
    prepared: torch.nn.Module = accelerator.prepare_model(model)
    return prepared


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: torch.nn.Module
) -> Callable[[torch.nn.Module], bool]:
    """The function that says of a module whether it is sharded for itself."""
    return block_policy(model, fsdp2_plugin)


def fsdp2_apply_ac(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """The model, whose blocks recompute their activations in the backward."""
    plugin = accelerator.state.fsdp_plugin
    checkpoint_activations(model, blocks_of(model, plugin), offload=plugin.activation_checkpointing_offload)
    return model


def fsdp2_load_full_state_dict(
    accelerator: Any,  # noqa: ARG001 - the model knows its processes
    model: torch.nn.Module,
    full_sd: Mapping[str, Any],
    cpu_offload: bool = False,
) -> torch.nn.Module:
    """The sharded model with complete weights, which the first process has; the others may pass an empty dictionary."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
    set_model_state_dict(model, dict(full_sd), options=options)
    return model


def fsdp2_switch_optimizer_parameters(optimizer: Optimizer, mapping: Mapping[int, torch.nn.Parameter]) -> None:
    """Have an optimizer update other weights, by the `data_ptr` of its own; `KeyError` for one that is missing."""
    for group in optimizer.param_groups:
        # Accelerate puts a number in the method's place
        addresses = [weight.data_ptr() if callable(weight.data_ptr) else weight.data_ptr for weight in group["params"]]
        group["params"] = [mapping[address] for address in addresses]


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """The values under names without those of wrappers that compile, or recompute activations."""
    return {
        name.replace("._checkpoint_wrapped_module", "").replace("._orig_mod", "").removeprefix("_orig_mod."): value
        for name, value in named_params.items()
    }


def get_parameters_from_modules(
    modules: Iterable[torch.nn.Module] | str | None, model: torch.nn.Module, device: torch.device | str
) -> set[torch.nn.Parameter]:
    """The weights of modules, or of those whose names a pattern matches, which come to a device."""
    found = ignored_weights(model, modules)
    for weight in found if isinstance(modules, str) else ():
        weight.data = weight.data.to(device)
    return found


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Torch's scaler of gradients, which knows sharded ones."""
    return torch.amp.GradScaler(**kwargs)
