"""Layers that are split along their width, with torch's `parallelize_module`: each process computes a part of every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import Embedding, Linear, Module

from accelerate_nb.config.did_you_mean import did_you_mean
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.parallelism_config import ParallelismConfig, TorchTensorParallelConfig
from accelerate_nb.runtime.strategies.fsdp.initial_weights import InitialWeights
from accelerate_nb.runtime.strategies.fsdp.wrapping import shared_weights
from accelerate_nb.runtime.strategies.prepare_request import PrepareRequest
from accelerate_nb.runtime.strategies.sharded import ShardedStrategy

# The ways to split a layer by their names in plans, most of which are those of transformers.
STYLES: Mapping[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
}
_EXAMPLE = "TorchTensorParallelConfig(plan={'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'})"


class TensorParallel(ShardedStrategy):
    """Every process has a part of the width of each layer that a plan names, and all see the same batches."""

    axes = ("tp",)
    _handler: TorchTensorParallelConfig | None = None

    def use_parallelism(self, config: ParallelismConfig) -> None:
        """Split layers along the configuration's mesh, by its plan or the model's own."""
        super().use_parallelism(config)
        self._handler = config.tp_handler

    def prepare_model(self, request: PrepareRequest) -> Module:
        """The model with split layers, and the first process's weights on all."""
        model: Module = request.value
        self.accept(model)
        model = self.precision.wrap_forward(model)
        weights = InitialWeights(self.world, getattr(model, "_init_weights", None))
        if self.world.size > 1:
            if self.device_mesh is None:
                self.device_mesh = init_device_mesh(self.world.device.type, (self.world.size,), mesh_dim_names=("tp",))
            split_layers(model, self.device_mesh["tp"], self._handler, weights)
        weights.bring(model)
        return self.compile(model, request.compiling)


def split_layers(
    model: Module, mesh: DeviceMesh, handler: TorchTensorParallelConfig | None, weights: InitialWeights
) -> None:
    """
    Split a model's layers over a mesh, one at a time, in place, as the plan says that was given, or the model's own.

    A model that was loaded in parts stays as it is. A layer whose weight another one shares stays whole. `ConfigurationError` says
    that there is no plan, or what it names that is not there, or can't be split so.
    """
    if any(isinstance(weight, DTensor) for weight in model.parameters()):
        return
    given = None if handler is None else handler.plan
    plan = given or getattr(model, "tp_plan", None) or {}
    if not plan:
        raise ConfigurationError(
            f"tp={mesh.size()} was requested, but {type(model).__name__} has no plan of its own. Pass one by names of its layers: "
            f"tp_handler={_EXAMPLE}."
        )
    _check_heads(model, mesh.size())
    shared = shared_weights(model)
    for pattern, style in plan.items():
        found = list(_named(model, pattern))
        if not found and given:
            names = [name for name, _ in model.named_modules() if name]
            raise ConfigurationError(
                f"The plan of tp names {pattern!r}, but the model has no such layer. "
                f"{did_you_mean(pattern, names, 'Names are ' + ', '.join(names[:6]) + ', …')}"
            )
        for name, layer in found:
            if not any(id(weight) in shared for weight in layer.parameters()):
                _split(name, layer, mesh, _style(pattern, style), weights)


def _split(name: str, layer: Module, mesh: DeviceMesh, style: ParallelStyle, weights: InitialWeights) -> None:
    size, width = mesh.size(), _width(layer, style)
    if width is not None and width % size:
        raise ConfigurationError(
            f"tp={size} was requested, but it does not divide the width {width} of {name}. Take another degree, or leave the layer "
            "out of the plan."
        )
    learns = {part: weight.requires_grad for part, weight in layer.named_parameters()}
    weights.bring(layer)
    parallelize_module(layer, mesh, style)
    for part, weight in layer.named_parameters():
        weight.requires_grad_(learns[part])


def _width(layer: Module, style: ParallelStyle) -> int | None:
    """The width that a way splits of a layer, where that is known."""
    if isinstance(layer, Linear) and isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return layer.out_features if isinstance(style, ColwiseParallel) else layer.in_features
    if isinstance(layer, Embedding) and isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return layer.embedding_dim if isinstance(style, ColwiseParallel) else layer.num_embeddings
    return None


def _style(pattern: str, style: Any) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise ConfigurationError(
            f"The plan of tp splits {pattern!r} by {style!r}, which is not known here. {did_you_mean(str(style), STYLES)} Known "
            f"ones are {', '.join(STYLES)}; an object of torch's ParallelStyle works too."
        )
    made: ParallelStyle = STYLES[style]()
    return made


def _named(model: Module, pattern: str) -> Iterator[tuple[str, Module]]:
    """The modules whose names a pattern matches, part by part."""
    wanted = pattern.split(".")
    for name, module in model.named_modules():
        parts = name.split(".")
        if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            yield name, module


def _check_heads(model: Module, size: int) -> None:
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ConfigurationError(
                f"tp={size} was requested, but it does not divide {name}={heads}. Take a degree that does."
            )
