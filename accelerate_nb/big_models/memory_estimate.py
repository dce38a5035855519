"""How much memory a model takes: its weights, and in training its gradients and the optimizer's state, on each of N ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from accelerate_nb.big_models.outlines import Outline, Weight

Optimizer: TypeAlias = Literal["adamw", "adam", "sgd", "sgd-momentum", "adafactor", "adam8bit"]

# The bytes of one number of each type in which weights are kept to compute with them.
DTYPES: dict[str, float] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int4": 0.5}
# torch's optimizers count the steps of each weight in a float32.
_STEP = 4
# bitsandbytes keeps the states of smaller weights as float32, those of others in bytes with a float32 for each block
# (`min_8bit_size` and the block size of bitsandbytes/optim/optimizer.py, `Optimizer2State`).
_SMALL, _BLOCK = 4096, 256


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the weights take in one type: in all, and in the largest layer; in bytes."""

    dtype: str
    total: int
    largest_layer: int


@dataclass(frozen=True, slots=True)
class State:
    """
    What a rank holds between two steps, in bytes, and `extra`: what comes and goes beside it while a step is computed.

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
class Training:
    """What training takes with these numbers: on one rank that has all, and on each of several, by how they share it."""

    precision: str
    alone: State
    ranks: dict[str, State]


def loaded(outline: Outline, dtype: str) -> Loaded:
    """
    What a model takes to compute with, its floating-point numbers kept as `dtype`.

    >>> loaded(outline("torch.nn:Linear", {"in_features": 3, "out_features": 2}), "float16").total
    16
    """
    return Loaded(dtype, _bytes(outline.weights, DTYPES[dtype]), largest_layer(outline, DTYPES[dtype])[1])


def largest_layer(outline: Outline, itemsize: float) -> tuple[str, int]:
    """The layer that takes the most, and its bytes, each floating-point number taking so many."""
    layers: dict[str, list[Weight]] = {}
    for one in outline.weights:
        layers.setdefault(one.layer, []).append(one)
    sizes = {name: _bytes(weights, itemsize) for name, weights in layers.items()}
    name = max(sizes, key=lambda each: sizes[each], default="")
    return name, sizes.get(name, 0)


def training(outline: Outline, precision: str, optimizer: Optimizer, ranks: int) -> Training:
    """
    What training takes: "float32", "mixed" (float32 weights, computed with in 16 bits) or "bfloat16" throughout.

    In mixed precision `torch.autocast` keeps a copy of 16 bits of each weight from its first use in the forward to the
    backward. DDP keeps the gradients a second time, in the buckets that it sends, unless `gradient_as_bucket_view`.
    """
    itemsize = 2 if precision == "bfloat16" else 4
    trained = [one for one in outline.weights if one.trains]
    copies = _bytes(outline.parameters, 2, floats_only=True) if precision == "mixed" else 0
    alone = State(
        weights=_bytes(outline.weights, itemsize),
        gradients=_bytes(trained, itemsize),
        optimizer=sum(_OPTIMIZERS[optimizer](one, itemsize) for one in trained),
        extra=copies,
    )
    _, layer = largest_layer(outline, 2 if precision == "mixed" else itemsize)
    return Training(precision, alone, shared(alone, ranks, layer))


def shared(alone: State, ranks: int, layer: int = 0) -> dict[str, State]:
    """
    What each of several ranks holds of what one rank would hold alone, by the way in which they share it.

    The three stages divide the optimizer's state, then the gradients, then the weights by the number of ranks: Rajbhandari
    et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5 and figure 1. A rank of
    the third gathers a layer at a time, of `layer` bytes, and holds its gradient whole until it has been spread.

    >>> shared(State(weights=20, gradients=20, optimizer=120), 4)["zero-3"]
    State(weights=5, gradients=5, optimizer=30, extra=0)
    """

    def part(size: int) -> int:
        return -(-size // ranks)

    one = alone
    buckets = one.gradients if ranks > 1 else 0
    gathered = 2 * layer if ranks > 1 else one.extra
    return {
        "ddp": State(one.weights, one.gradients, one.optimizer, one.extra + buckets),
        "zero-1": State(one.weights, one.gradients, part(one.optimizer), one.extra),
        "zero-2": State(one.weights, part(one.gradients), part(one.optimizer), one.extra),
        "zero-3": State(part(one.weights), part(one.gradients), part(one.optimizer), gathered),
    }


def _bytes(weights: Sequence[Weight], itemsize: float, *, floats_only: bool = False) -> int:
    """The bytes of tensors whose floating-point numbers take so many each."""
    each = (
        one.numbers * (itemsize if one.is_float else one.itemsize) for one in weights if one.is_float or not floats_only
    )
    return math.ceil(sum(each))


# ----------------------------------------------------------------------------------------------------------- optimizers


def _adam(weight: Weight, itemsize: int) -> int:
    """Two moments."""
    return 2 * weight.numbers * itemsize + _STEP


def _nothing(_weight: Weight, _itemsize: int) -> int:
    """SGD without momentum keeps nothing."""
    return 0


def _momentum(weight: Weight, itemsize: int) -> int:
    """One moment; `torch.optim.SGD` counts no steps."""
    return weight.numbers * itemsize


def _adafactor(weight: Weight, itemsize: int) -> int:
    """`torch.optim.Adafactor`: the second moment of a matrix as one row and one column, that of a vector whole."""
    if len(weight.shape) < 2:
        return weight.numbers * itemsize + _STEP
    rest = math.prod(weight.shape[:-2])
    return rest * (weight.shape[-1] + weight.shape[-2]) * itemsize + _STEP


def _adam8bit(weight: Weight, _itemsize: int) -> int:
    """Bitsandbytes' Adam: two moments of one byte, with a scale for each block."""
    if weight.numbers < _SMALL:
        return 2 * weight.numbers * 4
    return 2 * (weight.numbers + 4 * -(-weight.numbers // _BLOCK))


_OPTIMIZERS: dict[Optimizer, Callable[[Weight, int], int]] = {
    "adamw": _adam,
    "adam": _adam,
    "sgd": _nothing,
    "sgd-momentum": _momentum,
    "adafactor": _adafactor,
    "adam8bit": _adam8bit,
}
