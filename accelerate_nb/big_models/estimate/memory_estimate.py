"""The memory that a model takes: its weights, and in training its gradients and the optimizer's state, on each of N ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from accelerate_nb.big_models.estimate.model_outline import ModelOutline, TensorInfo

Optimizer: TypeAlias = Literal["adamw", "adam", "sgd", "sgd-momentum", "adafactor", "adam8bit"]

# The bytes of one number of each type in which weights are kept to compute with them.
DTYPES: dict[str, float] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int4": 0.5}
# torch's optimizers count the steps of each weight in a float32.
_STEP = 4
# bitsandbytes keeps the states of smaller weights as float32, those of others in bytes with a float32 for each block
# (`min_8bit_size` and the block size of bitsandbytes/optim/optimizer.py, `Optimizer2State`).
_SMALL, _BLOCK = 4096, 256


@dataclass(frozen=True, slots=True)
class WeightsSize:
    """The size of the weights in one type: in all, and in the largest layer; in bytes."""

    dtype: str
    total: int
    largest_layer: int


@dataclass(frozen=True, slots=True)
class TrainingStateSize:
    """
    The bytes that a rank holds between two steps, and `extra`: what comes and goes beside it while a step is computed.

    Activations, which depend on the batch, are not counted.
    """

    weights: int
    gradients: int
    optimizer: int
    extra: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.extra


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """The memory for training with these numbers: on one rank that has all, and on each of several, by how they share it."""

    precision: str
    alone: TrainingStateSize
    ranks: dict[str, TrainingStateSize]


def loaded(outline: ModelOutline, dtype: str) -> WeightsSize:
    """
    The memory for a model in inference, its floating-point numbers kept as `dtype`.

    >>> loaded(outline("torch.nn:Linear", {"in_features": 3, "out_features": 2}), "float16").total
    16
    """
    return WeightsSize(dtype, bytes_of(outline.weights, DTYPES[dtype]), largest_layer(outline, DTYPES[dtype])[1])


def largest_layer(outline: ModelOutline, itemsize: float) -> tuple[str, int]:
    """The layer that takes the most, and its bytes, each floating-point number taking so many."""
    layers: dict[str, list[TensorInfo]] = {}
    for weight in outline.weights:
        layers.setdefault(weight.layer, []).append(weight)
    sizes = {name: bytes_of(weights, itemsize) for name, weights in layers.items()}
    name = max(sizes, key=lambda item: sizes[item], default="")
    return name, sizes.get(name, 0)


def training(outline: ModelOutline, precision: str, optimizer: Optimizer, ranks: int) -> TrainingEstimate:
    """
    The memory for training: "float32", "mixed" (float32 weights, computed with in 16 bits) or "bfloat16" throughout.

    In mixed precision `torch.autocast` keeps a copy of 16 bits of each weight from its first use in the forward to the
    backward. DDP keeps the gradients a second time, in the buckets that it sends, unless `gradient_as_bucket_view`.
    """
    itemsize = 2 if precision == "bfloat16" else 4
    trained = [weight for weight in outline.weights if weight.trains]
    copies = bytes_of(outline.parameters, 2, floats_only=True) if precision == "mixed" else 0
    alone = TrainingStateSize(
        weights=bytes_of(outline.weights, itemsize),
        gradients=bytes_of(trained, itemsize),
        optimizer=sum(optimizer_bytes(optimizer, item, itemsize) for item in trained),
        extra=copies,
    )
    _, layer = largest_layer(outline, 2 if precision == "mixed" else itemsize)
    return TrainingEstimate(precision, alone, shared(alone, ranks, layer))


def shared(alone: TrainingStateSize, ranks: int, layer: int = 0) -> dict[str, TrainingStateSize]:
    """
    The part of each of several ranks in what one rank would hold alone, by the way in which they share it.

    The three stages divide the optimizer's state, then the gradients, then the weights by the number of ranks: Rajbhandari
    et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5 and figure 1. A rank of
    the third gathers a layer at a time, of `layer` bytes, and holds its gradient whole until it has been spread.

    >>> shared(TrainingStateSize(weights=20, gradients=20, optimizer=120), 4)["zero-3"]
    TrainingStateSize(weights=5, gradients=5, optimizer=30, extra=0)
    """

    def part(size: int) -> int:
        return -(-size // ranks)

    item = alone
    buckets = item.gradients if ranks > 1 else 0
    gathered = 2 * layer if ranks > 1 else item.extra
    return {
        "ddp": TrainingStateSize(item.weights, item.gradients, item.optimizer, item.extra + buckets),
        "zero-1": TrainingStateSize(item.weights, item.gradients, part(item.optimizer), item.extra),
        "zero-2": TrainingStateSize(item.weights, part(item.gradients), part(item.optimizer), item.extra),
        "zero-3": TrainingStateSize(part(item.weights), part(item.gradients), part(item.optimizer), gathered),
    }


def bytes_of(weights: Sequence[TensorInfo], itemsize: float, *, floats_only: bool = False) -> int:
    """The bytes of tensors whose floating-point numbers take so many each."""
    item = (
        weight.numbers * (itemsize if weight.is_float else weight.itemsize)
        for weight in weights
        if weight.is_float or not floats_only
    )
    return math.ceil(sum(item))


# ----------------------------------------------------------------------------------------------------------- optimizers


def _adam(weight: TensorInfo, itemsize: int) -> int:
    """Two moments."""
    return 2 * weight.numbers * itemsize + _STEP


def _adafactor(weight: TensorInfo, itemsize: int) -> int:
    """`torch.optim.Adafactor`: the second moment of a matrix as one row and one column, that of a vector whole."""
    if len(weight.shape) < 2:
        return weight.numbers * itemsize + _STEP
    rest = math.prod(weight.shape[:-2])
    return rest * (weight.shape[-1] + weight.shape[-2]) * itemsize + _STEP


def _adam8bit(weight: TensorInfo, _itemsize: int) -> int:
    """Bitsandbytes' Adam: two moments of one byte, with a scale for each block."""
    if weight.numbers < _SMALL:
        return 2 * weight.numbers * 4
    return 2 * (weight.numbers + 4 * -(-weight.numbers // _BLOCK))


_OPTIMIZERS: dict[Optimizer, Callable[[TensorInfo, int], int]] = {
    "adamw": _adam,
    "adam": _adam,
    "sgd": lambda _weight, _itemsize: 0,
    "sgd-momentum": lambda weight, itemsize: weight.numbers * itemsize,  # one moment; `torch.optim.SGD` counts no steps
    "adafactor": _adafactor,
    "adam8bit": _adam8bit,
}


def optimizer_bytes(optimizer: Optimizer, weight: TensorInfo, itemsize: int) -> int:
    """The bytes that an optimizer remembers of a weight whose numbers take `itemsize` bytes each."""
    return _OPTIMIZERS[optimizer](weight, itemsize)
