"""The memory of a training on each rank of a mesh, and the smallest mesh on which it fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from accelerate_nb.big_models.estimate.memory_estimate import Optimizer, TrainingStateSize, bytes_of, optimizer_bytes
from accelerate_nb.big_models.estimate.model_outline import ModelOutline, TensorInfo
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.world.mesh import Mesh

# A smaller mesh is proposed only where so much of a device is left for activations.
_FREE = 0.2
# Layers are split along their width between devices of one machine.
_MOST_TP = 8
_LARGEST_WORLD = 4096


@dataclass(frozen=True, slots=True)
class MeshEstimate:
    """The bytes of a rank on each stage of a mesh's pipeline, or of every rank where there is one stage."""

    mesh: Mesh
    precision: str
    stages: tuple[TrainingStateSize, ...]

    @property
    def largest(self) -> TrainingStateSize:
        """The memory of the rank that holds the most."""
        return max(self.stages, key=lambda stage: stage.total)


def on_mesh(outline: ModelOutline, precision: str, optimizer: Optimizer, mesh: Mesh) -> MeshEstimate:
    """
    The memory for a training on a mesh: layers on stages (pp), split along their width (tp), sharded (dp_shard and cp), or copied.

    `precision` is as in `training`. Under FSDP a rank has its part of each tensor, cut along the first dimension, and for a moment two
    blocks and what is in no block whole, with the gradient of one. Activations are not counted.

    >>> half = on_mesh(outline("torch.nn:Linear", {"in_features": 4, "out_features": 6}), "float32", "sgd", Mesh(dp_shard=2))
    >>> half.largest.weights
    60
    """
    if mesh.tp > 1 and not any(weight.split is not None for weight in outline.weights):
        raise ConfigurationError(
            f"The memory on {mesh} was requested, but {outline.source} has no plan by which tp would split it. Name the "
            "configuration of a model of transformers that has one, or leave tp out."
        )
    stages = _stages(outline.weights, mesh.pp)
    return MeshEstimate(mesh, precision, tuple(_on_rank(stage, precision, optimizer, mesh) for stage in stages))


def smallest_mesh(
    outline: ModelOutline, precision: str, optimizer: Optimizer, memory: int, limit: int = _LARGEST_WORLD
) -> MeshEstimate | None:
    """
    The estimate for the mesh of the fewest ranks of `memory` bytes each on which a training fits; `None` where none of `limit` does.

    A fifth of the memory is left for activations. Numbers of ranks are powers of two. Of meshes with equally many ranks the one that
    communicates the least comes first: shards alone, then with split layers, then with stages.
    """
    size = 1
    while size <= limit:
        for mesh in _meshes(outline, size):
            found = on_mesh(outline, precision, optimizer, mesh)
            if found.largest.total <= memory * (1 - _FREE):
                return found
        size *= 2
    return None


def _meshes(outline: ModelOutline, size: int) -> Iterator[Mesh]:
    yield Mesh(dp_shard=size)
    degrees = [degree for degree in (2, 4, 8) if degree <= min(size, _MOST_TP)]
    splits = [weight.shape[weight.split] for weight in outline.weights if weight.split is not None]
    for degree in degrees:
        if splits and all(width % degree == 0 for width in splits):
            yield Mesh(dp_shard=size // degree, tp=degree)
    blocks = {block for weight in outline.weights if (block := block_of(weight))}
    for degree in degrees:
        if degree <= len(blocks):
            yield Mesh(dp_shard=size // degree, pp=degree)


def block_of(weight: TensorInfo) -> str:
    """
    The name of the block of a tensor, up to the first number in its name; empty for what is in no block.

    >>> block_of(TensorInfo("model.layers.3.mlp.up.weight", (1,), 4, True, True, False, "model.layers.3"))
    'model.layers.3'
    """
    parts = weight.name.split(".")
    number = next((index for index, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _stages(weights: Sequence[TensorInfo], count: int) -> list[list[TensorInfo]]:
    """The tensors of each stage, which have about equally many numbers, as the runtime cuts them."""
    if count == 1:
        return [list(weights)]
    # not before it is used: it loads what trains
    from accelerate_nb.runtime.strategies.pipeline.stage_plan import balanced

    on_all = [weight for weight in weights if weight.is_buffer and not block_of(weight)]
    named: dict[str, list[TensorInfo]] = {}
    for weight in weights:
        if not weight.is_buffer or block_of(weight):
            named.setdefault(block_of(weight) or weight.layer, []).append(weight)
    layers = list(named.values())
    if len(layers) < count:
        raise ConfigurationError(
            f"The memory on {count} stages of a pipeline was requested, but the model has {len(layers)} layers. Take fewer stages."
        )
    starts = [0, *balanced([float(sum(weight.numbers for weight in layer)) for layer in layers], count), len(layers)]
    return [on_all + [weight for layer in layers[start:end] for weight in layer] for start, end in pairwise(starts)]


def _on_rank(weights: Sequence[TensorInfo], precision: str, optimizer: Optimizer, mesh: Mesh) -> TrainingStateSize:
    itemsize = 2 if precision == "bfloat16" else 4
    computed = 4 if precision == "float32" else 2
    split = [_split(weight, mesh.tp) for weight in weights]
    shards = mesh.dp_shard * mesh.cp if mesh.dp_shard > 1 else 1
    parts = [_part(weight, shards) for weight in split]
    trained = [weight for weight in parts if weight.trains]
    gradients = bytes_of(trained, itemsize)
    if shards > 1:
        extra = _gathered(split, computed)
    else:
        copies = bytes_of(parts, 2, floats_only=True) if precision == "mixed" else 0
        extra = copies + (gradients if mesh.dp_replicate * mesh.cp > 1 else 0)
    return TrainingStateSize(
        weights=bytes_of(parts, itemsize),
        gradients=gradients,
        optimizer=sum(optimizer_bytes(optimizer, weight, itemsize) for weight in trained),
        extra=extra,
    )


def _split(weight: TensorInfo, degree: int) -> TensorInfo:
    """A rank's part of a tensor that is split along a width; others are whole."""
    return weight if weight.split is None else _cut(weight, weight.split, degree)


def _part(weight: TensorInfo, shards: int) -> TensorInfo:
    """A rank's shard of a parameter, the first and largest one; buffers are whole."""
    return weight if weight.is_buffer or not weight.shape else _cut(weight, 0, shards)


def _cut(weight: TensorInfo, dimension: int, degree: int) -> TensorInfo:
    length = math.ceil(weight.shape[dimension] / degree)
    return replace(weight, shape=(*weight.shape[:dimension], length, *weight.shape[dimension + 1 :]))


def _gathered(weights: Iterable[TensorInfo], itemsize: float) -> int:
    """What is whole for a moment: what is in no block, two blocks (one is fetched ahead), and the gradient of the largest of these."""
    sizes: dict[str, int] = {}
    for weight in weights:
        if not weight.is_buffer:
            sizes[block_of(weight)] = sizes.get(block_of(weight), 0) + bytes_of([weight], itemsize)
    outside = sizes.pop("", 0)
    largest = sorted(sizes.values())[-2:]
    return outside + sum(largest) + max([outside, *largest])
