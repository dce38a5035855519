"""The base of strategies whose processes have parts of weights, as torch's DTensors."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.runtime.checkpoints import named_states
from accelerate_nb.runtime.checkpoints.load_file import LoadedFile
from accelerate_nb.runtime.checkpoints.writer import FileToWrite
from accelerate_nb.runtime.operations import sharded_tensors
from accelerate_nb.runtime.strategies.base import Options, PrepareRequest, Strategy
from accelerate_nb.runtime.training.repoint import load_original_state, original_state
from accelerate_nb.runtime.world.world import World


class ShardedStrategy(Strategy):
    """Processes have parts of weights: gradients are measured together, and checkpoints written in parts."""

    copies_are_whole = False
    hooks_get_weights = False

    @property
    def writes_parts(self) -> bool:
        """Whether checkpoints are in parts, a file a process, rather than complete."""
        return True

    def prepare(self, requests: Sequence[PrepareRequest]) -> list[Any]:
        """The models and optimizers of one call, in their order; optimizers step over weights of any meshes."""
        prepared = super().prepare(requests)
        for optimizer in self.optimizers:
            sharded_tensors.step_by_weight(optimizer)
        return prepared

    def clip_norm(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients down to a norm, whole ones and parts together; returns the norm that they had, on all processes."""
        weights = _with_gradients(parameters)
        norm = self.gradient_norm(weights, float(norm_type))
        # as torch.nn.utils.clip_grad_norm_ has it
        sharded_tensors.scale(_gradients(weights), torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def gradient_norm(self, weights: Sequence[Tensor], norm_type: float) -> Tensor:
        """The norm of these weights' gradients, whole ones and parts together, on all processes."""
        return sharded_tensors.norm(_gradients(weights), norm_type, self.world.device)

    def clip_value(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Cut each gradient at a value."""
        for gradient in _gradients(_with_gradients(parameters)):
            sharded_tensors.local(gradient).clamp_(-clip_value, clip_value)

    # Weights

    def model_state(self, model: Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The complete weights on the CPU of each machine's first process, one whole at a time elsewhere; all processes call it."""
        state: dict[str, Any] = {}
        for name, value in original_state(self.unwrap(model)).items():
            complete = sharded_tensors.whole(value) if isinstance(value, Tensor) else value
            if self.world.is_local_main:
                state[name] = complete.cpu() if isinstance(value, DTensor) else complete
        return state

    def load_model_state(self, model: Module, state: dict[str, Any], **options: Any) -> Any:
        """Give a prepared model complete weights, of which each process takes its part."""
        sharded = self.unwrap(model)
        return load_original_state(sharded, named_states.parts_of(state, original_state(sharded)), **options)

    # Checkpoints

    def files(self, models: Sequence[Any], weights: Any, optimizers: Sequence[Any], **how: Any) -> list[FileToWrite]:
        """This process's parts, or the complete weights and states of optimizers, as `writes_parts` says."""
        unwrapped = [self.unwrap(model) for model in models]
        files: list[FileToWrite] = []
        for index, model in enumerate(unwrapped):
            files += named_states.model_files(self.world, named_states.model_state(model), index, self.writes_parts)
        for index, optimizer in enumerate(optimizers):
            files += named_states.optimizer_files(self.world, optimizer, unwrapped, index, self.writes_parts)
        return files

    def window_gradients(self, model: Module) -> dict[str, Tensor]:
        """This process's parts of the averaged gradients of a window; what was held is averaged for it, and stays held."""
        inner = self.unwrap(model)
        held = {id(weight): part for weight, part in _held_parts(inner)}
        found = {}
        for name, weight in inner.named_parameters():
            parts = [] if weight.grad is None else [sharded_tensors.local(weight.grad)]
            parts += [held[id(weight)]] if id(weight) in held else []
            if parts:
                found[name] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return found

    def set_window_gradients(self, model: Module, saved: Mapping[str, Tensor]) -> None:
        """Have these parts of gradients, and no others."""
        for name, weight in self.unwrap(model).named_parameters():
            gradient, own = saved.get(name), sharded_tensors.local(weight)
            if gradient is not None and (gradient := sharded_tensors.local(gradient)).shape != own.shape:
                raise CheckpointError(
                    f"The checkpoint holds the gradients of a window of accumulation by another number of processes: {name} has "
                    f"{tuple(gradient.shape)} there, and {tuple(own.shape)} here. Load it with as many, or save at a window's end."
                )
            weight.grad = None
            if gradient is not None:
                # beside the weight, which may wait on the host
                weight.grad = torch.empty_like(weight)
                sharded_tensors.local(weight.grad).copy_(gradient)

    def _loaded_optimizers(
        self, folder: Path, models: Sequence[Any], optimizers: Sequence[Any], options: Options
    ) -> list[LoadedFile]:
        unwrapped = [self.unwrap(model) for model in models]
        numbered = enumerate(optimizers)
        return [named_states.load_optimizer(folder, index, optimizer, unwrapped) for index, optimizer in numbered]


def _with_gradients(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    return [weight for weight in given if weight.grad is not None]


def _gradients(weights: Iterable[Tensor]) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


# The gradients of a window of accumulation, where `fully_shard` has cut weights


def _held_parts(model: Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Sharded weights with this process's part of the average of the whole gradients that processes have kept to themselves."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        # torch 2.13 and later have several groups a module, earlier ones one
        state: Any = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for weight in chain.from_iterable(group.fsdp_params for group in groups if group is not None):
            gradient = weight.unsharded_accumulated_grad
            if gradient is None and hasattr(weight, "_unsharded_param"):
                gradient = weight._unsharded_param.grad
            if gradient is not None:
                own = sharded_tensors.local(gradient).to(weight.sharded_param.dtype)
                yield weight.sharded_param, _part(_averaged(own, weight.mesh_info), weight)


def _averaged(gradient: Tensor, mesh: Any) -> Tensor:
    """The mean over the processes that shard a weight, and over copies of these; not over those that split its layer."""
    average = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(average, group=mesh.shard_process_group)
    copies = getattr(mesh, "replicate_mesh_size", 1)
    if copies > 1:
        dist.all_reduce(average, group=mesh.replicate_process_group)
    return average.div_(mesh.shard_mesh_size * copies)


def _part(whole: Tensor, weight: Any) -> Tensor:
    """The part that torch gives this process of a weight, or an empty one."""
    dim, rank = weight.fsdp_placement.dim, weight.mesh_info.shard_mesh_rank
    parts = whole.chunk(weight.mesh_info.shard_mesh_size, dim)
    return parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)


# The weights that a training begins with


def shared_weights(model: Module) -> dict[int, list[Module]]:
    """For each weight that several modules have under a name of their own, those modules."""
    owners: dict[int, list[Module]] = {}
    for module in model.modules():
        for weight in module._parameters.values():
            if weight is not None:
                owners.setdefault(id(weight), []).append(module)
    return {weight: modules for weight, modules in owners.items() if len(modules) > 1}


class InitialWeights:
    """The first process's weights and buffers, brought to every device a part of the model at a time, so that none holds it whole."""

    # what is on the meta device there is initialised by `initialise`, which gets a module, or by the module's reset_parameters

    def __init__(
        self, world: World, initialise: Callable[[Module], object] | None = None, ignored: Iterable[Parameter] = ()
    ) -> None:
        self.world, self.initialise = world, initialise
        # those that stay whole, as they are now
        self.ignored: set[Parameter] = set()
        self._ignored = {id(weight) for weight in ignored}
        self._modules: set[int] = set()

    def bring(self, module: Module) -> None:
        """Replace the weights and buffers of a module and its parts by the first process's, each part once, tied ones together."""
        brought: dict[Parameter, Parameter] = {}
        for part in module.modules():
            if id(part) not in self._modules:
                self._modules.add(id(part))
                self._bring_own(part, brought)

    def _bring_own(self, part: Module, brought: dict[Parameter, Parameter]) -> None:
        # what is in parts was loaded so
        former = {
            name: weight
            for name, weight in part._parameters.items()
            if weight is not None and not isinstance(weight, DTensor)
        }
        if self.world.is_main:
            self._initialise(part, brought)
        for name, weight in former.items():
            if weight not in brought:
                current = part._parameters[name]
                assert current is not None, "initialising a module gives its weights numbers"
                brought[weight] = Parameter(self._tensor(current.detach()), weight.requires_grad)
            part._parameters[name] = brought[weight]
            if id(weight) in self._ignored:
                self.ignored.add(brought[weight])
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = self._tensor(buffer)

    def _tensor(self, tensor: Tensor) -> Tensor:
        device = self.world.device
        if self.world.is_main:
            brought = tensor.to(device).contiguous()
        else:
            brought = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if self.world.size > 1:
            dist.broadcast(brought, 0)
        return brought

    def _initialise(self, part: Module, brought: dict[Parameter, Parameter]) -> None:
        """Give numbers to what is on the meta device here, too; a tied weight has them already where another module has it."""
        device = self.world.device
        weights = {
            name: Parameter(torch.empty_like(weight, device=device), weight.requires_grad)
            for name, weight in part._parameters.items()
            if weight is not None and weight.is_meta and weight not in brought
        }
        buffers = {
            name: torch.empty_like(buffer, device=device)
            for name, buffer in part._buffers.items()
            if buffer is not None and buffer.is_meta
        }
        if not weights and not buffers:
            return
        part._parameters.update(weights)
        part._buffers.update(buffers)
        initialise = self.initialise or getattr(type(part), "reset_parameters", None)
        if initialise is None:
            raise ConfigurationError(
                f"A {type(part).__name__} of the model is on the meta device on the first process, too, and has no "
                "`reset_parameters`. Make the model on the CPU there, or pass `param_init_fn=` to the plugin."
            )
        with torch.no_grad():
            initialise(part)
