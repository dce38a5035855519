"""The stages of a model: which of its layers each stage has."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, Parameter, Sequential
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from accelerate_nb.config.value_types import did_you_mean
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
from accelerate_nb.runtime.strategies.fsdp.wrapping import CHECKPOINTED, block_policy, inner

# Positional arguments of a model, or keyword arguments.
ExampleInputs: TypeAlias = tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """A part of a model that is on one stage: a block, or a module of its own; `stage` is the index of that stage."""

    name: str
    module: Module
    stage: int


def plan_stages(
    model: Module,
    count: int,
    begins: Sequence[str] | str = "auto",
    example: ExampleInputs | None = None,
    no_split: Collection[str] | None = None,
) -> list[Layer]:
    """The layers of a model in registration order, each with its stage of `count`, which `begins` names, or costs balance."""
    # what is in no layer, such as weights of the model itself, is on every stage
    found = list(layers_of(model, no_split))
    if len(found) < count:
        raise ConfigurationError(
            f"{count} stages of a pipeline were requested, but {type(model).__name__} has {len(found)} layers that can be separated: "
            f"{', '.join(name for name, _ in found) or 'none'}. Take fewer stages."
        )
    if isinstance(begins, str):
        costs = (
            [float(sum(weight.numel() for weight in module.parameters())) for _, module in found]
            if example is None
            else operations(model, [name for name, _ in found], example)
        )
        starts = balanced(costs, count)
    else:
        starts = _named_starts([name for name, _ in found], begins, count)
    return [Layer(name, module, sum(start <= index for start in starts)) for index, (name, module) in enumerate(found)]


def layers_of(model: Module, no_split: Collection[str] | None = None) -> Iterator[tuple[str, Module]]:
    """The named parts not to be separated: blocks, and beside these the largest modules without a block, or a `Sequential`'s elements."""
    if no_split is None:
        is_block = block_policy(model, FullyShardedDataParallelPlugin(fsdp_version=2))
    else:
        is_block = lambda module: type(module).__name__ in no_split  # noqa: E731
    blocks = {id(module) for module in model.modules() if module is not model and is_block(inner(module))}

    def parts(module: Module, prefix: str) -> Iterator[tuple[str, Module]]:
        for name, child in module.named_children():
            # a wrapper that recomputes activations is not in names
            path = prefix.removesuffix(".") if name == CHECKPOINTED else f"{prefix}{name}"
            holds_blocks = any(id(part) in blocks for part in child.modules() if part is not child)
            if next(child.parameters(), None) is None:
                continue
            if id(child) not in blocks and (holds_blocks or isinstance(child, (Sequential, ModuleList, ModuleDict))):
                yield from parts(child, f"{path}.")
            else:
                yield path, child

    yield from parts(model, "")


def operations(model: Module, names: Sequence[str], example: ExampleInputs) -> list[float]:
    """The floating-point operations of each of these layers in a forward of inputs of these shapes; nothing is computed."""
    memo: dict[int, Any] = {
        id(tensor): tensor.detach().to("meta") for tensor in [*model.parameters(), *model.buffers()]
    }
    twin = deepcopy(model, memo)
    found: dict[str, float] = defaultdict(float)
    counter = FlopCounterMode(display=False)

    def count(name: str, sign: int) -> None:
        found[name] += sign * counter.get_total_flops()

    for name in names:
        part = twin.get_submodule(name)
        # the difference of what was counted before and after
        part.register_forward_pre_hook(lambda *_, name=name: count(name, -1))
        part.register_forward_hook(lambda *_, name=name: count(name, 1))
    arguments, keywords = ((), example) if isinstance(example, Mapping) else (example, {})
    arguments, keywords = tree_map(
        lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (arguments, keywords)
    )
    try:
        with torch.no_grad(), counter:
            twin(*arguments, **keywords)
    except Exception as error:
        raise ConfigurationError(
            f"The operations of {type(model).__name__} could not be counted for the example_inputs: {error}. Leave them out for stages "
            "with about equally many weights, or name the split_points."
        ) from error
    return [found[name] for name in names]


def balanced(costs: Sequence[float], count: int) -> list[int]:
    """The indices at which the second and later of `count` runs of costs begin, whose largest sum is as small as can be."""
    total = [0.0, *accumulate(costs)]
    size = len(costs)
    # the largest sum of the best cut of the first layers into so many runs, and where the last of these begins
    best: list[tuple[float, int]] = [(total[end], 0) for end in range(size + 1)]
    begins: list[list[int]] = []
    for runs in range(2, count + 1):
        current = [(float("inf"), 0)] * (size + 1)
        for end in range(runs, size + 1):
            current[end] = min(
                (max(best[start][0], total[end] - total[start]), start) for start in range(runs - 1, end)
            )
        best = current
        begins.append([start for _, start in current])
    starts: list[int] = []
    end = size
    for column in reversed(begins):
        end = column[end]
        starts.append(end)
    return starts[::-1]


def _named_starts(names: Sequence[str], begins: Sequence[str], count: int) -> list[int]:
    if len(begins) != count - 1:
        raise ConfigurationError(
            f"{count} stages of a pipeline were requested, and the beginnings of {len(begins) + 1}: {', '.join(begins) or 'none'}. "
            f"Name {count - 1}: the first stage begins with the model."
        )
    found: list[int] = []
    for begin in begins:
        inside = [index for index, name in enumerate(names) if f"{name}.".startswith(f"{begin}.")]
        if not inside:
            known = ", ".join(names[:8])
            raise ConfigurationError(
                f"A stage of the pipeline should begin at {begin!r}, but the model has no layer of this name that can be separated. "
                f"{did_you_mean(begin, names, f'Layers are {known}, …')}"
            )
        found.append(inside[0])
    if found != sorted(set(found)) or found[0] == 0:
        raise ConfigurationError(
            f"Stages of the pipeline should begin at {', '.join(begins)}, but the model's layers stand in the order "
            f"{', '.join(names)}. Name the beginnings in this order, each once, and not the first layer."
        )
    return found


def shared_by_stages(layers: Sequence[Layer], model: Module) -> dict[Parameter, set[int]]:
    """The weights that several stages have, with these: those that layers share, and those in no layer, which all stages have."""
    count = 1 + max(layer.stage for layer in layers)
    stages: dict[Parameter, set[int]] = {}
    for layer in layers:
        for weight in layer.module.parameters():
            stages.setdefault(weight, set()).add(layer.stage)
    for weight in model.parameters():
        stages.setdefault(weight, set(range(count)))
    return {weight: held for weight, held in stages.items() if len(held) > 1}
