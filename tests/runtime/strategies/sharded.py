"""A strategy that shards weights with torch's FSDP2: it shows that one may replace weights, and write files of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from accelerate_nb import Strategy
from accelerate_nb.runtime.checkpoints.io.writer import FileToWrite
from accelerate_nb.runtime.checkpoints.load_file import LoadedFile, read
from accelerate_nb.runtime.strategies.prepare_request import PrepareRequest
from accelerate_nb.runtime.training.optimizer import innermost

_WHOLE = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


class Sharded(Strategy):
    """Each process has a part of every weight, of its gradient and of what the optimizer remembers."""

    axes = ("dp_shard",)
    copies_are_whole = False

    def prepare_model(self, request: PrepareRequest) -> nn.Module:
        """Shard the model before it moves, and before it is compiled."""
        mesh = init_device_mesh(self.world.device.type, (self.world.size,))
        model = self.precision.wrap_forward(request.value)
        for part in model.children():
            fully_shard(part, mesh=mesh)
        return self.compile(fully_shard(model, mesh=mesh), request.compiling)

    def clip_norm(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        norm = super().clip_norm(parameters, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def model_state(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        return {name: weight.full_tensor() for name, weight in self.unwrap(model).state_dict().items()}

    def load_model_state(self, model: nn.Module, state: dict[str, Any], **options: Any) -> Any:
        return states.set_model_state_dict(self.unwrap(model), state, options=_WHOLE)

    def files(
        self,
        models: Sequence[Any],
        weights: Sequence[dict[str, Any]],
        optimizers: Sequence[Any],
        *,
        writes_shared: bool,
        safe: bool,
    ) -> list[FileToWrite]:
        """Complete weights by one process, and each process's shards of what the optimizers remember."""
        files = super().files(models, weights, [], writes_shared=writes_shared, safe=safe)
        for index, optimizer in enumerate(optimizers):
            shards = [{name: _local(value) for name, value in kept.items()} for kept in optimizer.state.values()]
            files.append(FileToWrite(f"optimizer_{index}_{self.world.rank}.pkl", shards))
        return files

    def load(
        self,
        folder: Path,
        models: Sequence[Any],
        optimizers: Sequence[Any],
        options: Mapping[str, Any],
        model_options: Mapping[str, Any],
    ) -> list[LoadedFile]:
        found = super().load(folder, models, [], options, model_options)
        for index, optimizer in enumerate(optimizers):
            path = folder / f"optimizer_{index}_{self.world.rank}.pkl"
            content = read(path, "the shards of an optimizer's state")
            found.append(
                LoadedFile(path, "an optimizer's shards", content, lambda shards, of=optimizer: _give(of, shards))
            )
        return found

    def window_gradients(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: _local(gradient) for name, gradient in super().window_gradients(model).items()}

    def set_window_gradients(self, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
        for name, weight in self.unwrap(model).named_parameters():
            weight.grad = _sharded_as(weight, saved[name]) if name in saved else None


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _sharded_as(weight: Any, shard: Tensor) -> Tensor:
    return DTensor.from_local(shard, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride())


def _give(optimizer: Any, shards: list[dict[str, Any]]) -> None:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for weight, kept in zip(weights, shards, strict=True):
        is_shard = {name: torch.is_tensor(value) and value.ndim > 0 for name, value in kept.items()}
        innermost(optimizer).state[weight] = {
            name: _sharded_as(weight, value) if is_shard[name] else value for name, value in kept.items()
        }
