"""The stages of a model, of consecutive layers, and the model whose own forward computes one stage at a time, others absent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, Parameter, Sequential
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from accelerate_nb.config.value_types import did_you_mean
from accelerate_nb.errors import ConfigurationError, DataError, StateError
from accelerate_nb.runtime.strategies.base import Inputs
from accelerate_nb.runtime.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
from accelerate_nb.runtime.strategies.fsdp.strategy import CHECKPOINTED, block_policy, inner

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

    @cache
    def best(end: int, runs: int) -> tuple[float, tuple[int, ...]]:
        """The largest sum of the first layers in so many runs, and where the later of these begin, the last first."""
        if runs == 1:
            return total[end], ()
        former = [(start, *best(start, runs - 1)) for start in range(runs - 1, end)]
        return min((max(largest, total[end] - total[start]), (start, *starts)) for start, largest, starts in former)

    return list(reversed(best(len(costs), count)[1]))


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


class AbsentTensor(Tensor):
    """A tensor without numbers, for layers on other processes; `layers` are those of whose outputs it was computed since."""

    meta: Tensor
    layers: frozenset[int]

    @staticmethod
    def __new__(
        cls: type[AbsentTensor], meta: Tensor, device: torch.device, layers: frozenset[int] = frozenset()
    ) -> AbsentTensor:
        made: AbsentTensor = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        made.meta, made.layers = meta, layers
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch gives no type
        return f"AbsentTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch gives it as a function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The operation on shapes alone."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise StateError(
                "A number of a tensor was requested that another stage of the pipeline computes. Pass on what later layers need "
                "through the layers' inputs, or put these layers into one stage."
            )
        if func._schema.is_mutable and not isinstance(args[0], AbsentTensor):
            raise StateError(
                f"{func} would write to a tensor what another stage of the pipeline computes. Put these layers into one stage."
            )
        absent = absent_in([args, kwargs])
        device, layers = absent[0].device, frozenset().union(*(tensor.layers for tensor in absent))
        found = func(*to_meta(args), **to_meta(kwargs))
        return tree_map(lambda leaf: AbsentTensor(leaf, device, layers) if isinstance(leaf, Tensor) else leaf, found)


def to_meta(values: Any) -> Any:
    """A nest with shapes alone in place of tensors, and the meta device in place of others."""

    def shape_of(leaf: Any) -> Any:
        if isinstance(leaf, AbsentTensor):
            return leaf.meta
        if isinstance(leaf, Tensor):
            return leaf.detach().to("meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    return tree_map(shape_of, values)


def absent_in(values: Any) -> list[AbsentTensor]:
    """The tensors of a nest whose numbers are on another process."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, AbsentTensor)]


@dataclass(frozen=True, slots=True)
class OutputShape:
    """A layer's output: its leaves, with absent tensors in place of tensors, and how they are nested."""

    leaves: Sequence[Any]
    structure: TreeSpec

    @property
    def tensors(self) -> list[AbsentTensor]:
        """The tensors that a stage sends."""
        return [leaf for leaf in self.leaves if isinstance(leaf, AbsentTensor)]

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """The output with these tensors."""
        rest = iter(tensors)
        return tree_unflatten(
            [next(rest) if isinstance(leaf, AbsentTensor) else leaf for leaf in self.leaves], self.structure
        )


class StagedModel:
    """A model that is cut into stages, of which this process holds some."""

    # the model's own forward runs on every stage: layers of earlier stages return absent tensors, the last of them what was received,
    # and it ends where a later stage begins; so masks and positions are there on each stage, and nothing is traced

    def __init__(self, model: Module, layers: Sequence[Layer], device: torch.device) -> None:
        self.model, self.layers = model, layers
        self.count = 1 + max(layer.stage for layer in layers)
        self.held: Collection[int] = range(self.count)
        self._last = {layer.stage: index for index, layer in enumerate(layers)}
        self._twins = [_without_numbers(layer.module, device) for layer in layers]
        self._shapes: dict[Any, dict[int, OutputShape]] = {}
        self._run: _ShapeRun | _StageRun | None = None
        for index, layer in enumerate(layers):
            _intercept(layer.module, partial(self._call, index))

    @property
    def is_running(self) -> bool:
        """Whether the model's forward is run for a stage now."""
        return self._run is not None

    def stage_of_names(self) -> dict[str, int]:
        """The stage of each weight and buffer of a layer, by names; the first of those that share it."""
        found: dict[str, int] = {}
        for layer in self.layers:
            for name in layer.module.state_dict(keep_vars=True):
                found.setdefault(f"{layer.name}.{name}", layer.stage)
        return found

    def received_shape(self, stage: int, inputs: Inputs) -> OutputShape:
        """The output that a stage receives from the one before it."""
        return self.shapes(inputs)[self._last[stage - 1]]

    def shapes(self, inputs: Inputs) -> dict[int, OutputShape]:
        """The output of each layer but the last stage's, of inputs of these shapes; nothing is computed."""
        key = self.key(inputs)
        if key not in self._shapes:
            run = _ShapeRun(self)
            with torch.no_grad():
                self._run_model(run, inputs)
            for index in list(self._last.values())[:-1]:
                if index not in run.found:
                    raise ConfigurationError(
                        f"The model did not call {self.layers[index].name}, with which stage {self.layers[index].stage} of the pipeline "
                        "ends. Name other beginnings of stages."
                    )
            self._shapes[key] = run.found
        return self._shapes[key]

    def key(self, inputs: Inputs) -> Any:
        """The same for inputs of the same shapes, in the same mode."""
        leaves, structure = tree_flatten(inputs)
        shapes = [
            (tuple(leaf.shape), leaf.dtype)
            if isinstance(leaf, Tensor)
            else (leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf))
            for leaf in leaves
        ]
        return str(structure), tuple(shapes), self.model.training

    def compute(self, stage: int, inputs: Inputs, received: Sequence[Tensor] = ()) -> Any:
        """The model's output, from the last stage; from another one the tensors for the next."""
        run = _StageRun(self, stage, self.shapes(inputs), received)
        output = self._run_model(run, inputs)
        if stage < self.count - 1:
            # the tensors of the last layer's output, in the dtypes that the next stage expects
            tensors = [leaf for leaf in tree_leaves(run.sent) if isinstance(leaf, Tensor)]
            shapes = run.shapes[self._last[stage]].tensors
            return [tensor.to(shape.dtype).contiguous() for tensor, shape in zip(tensors, shapes, strict=True)]
        if absent_in(output):
            raise ConfigurationError(
                "The model's output holds a tensor that another stage of the pipeline than the last one computes. Return what the "
                "last layers compute, or name other beginnings of stages."
            )
        return output

    def _run_model(self, run: _ShapeRun | _StageRun, inputs: Inputs) -> Any:
        arguments, keywords = inputs
        self._run = run
        try:
            return self.model(*arguments, **keywords)
        except _StageEnd:
            return None
        finally:
            self._run = None

    def _call(self, index: int, call: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        if self._run is not None:
            return self._run.output(index, call, arguments, keywords)
        layer = self.layers[index]
        # what is computed once more in a backward is called outside of a run
        if layer.stage in self.held:
            return call(*arguments, **keywords)
        raise StateError(
            f"{layer.name} was called, but its weights are on stage {layer.stage} of the pipeline, on another process. Call the model "
            "that `prepare` returned, on all processes."
        )


class _StageEnd(BaseException):
    """Ends a model's forward where a later stage begins; no `except Exception` of the model is meant."""


@dataclass(slots=True)
class _ShapeRun:
    """A forward of shapes alone, to the beginning of the last stage."""

    staged: StagedModel
    found: dict[int, OutputShape] = field(default_factory=dict)

    def output(self, index: int, _call: Any, arguments: Any, keywords: Any) -> Any:
        staged = self.staged
        layer = staged.layers[index]
        self._check(layer, {found for tensor in absent_in([arguments, keywords]) for found in tensor.layers})
        if layer.stage == staged.count - 1:
            raise _StageEnd
        output = staged._twins[index].train(layer.module.training)(*arguments, **keywords)
        output = tree_map(
            lambda leaf: (
                AbsentTensor(leaf.meta, leaf.device, frozenset({index})) if isinstance(leaf, AbsentTensor) else leaf
            ),
            output,
        )
        self.found[index] = OutputShape(*tree_flatten(output))
        return output

    def _check(self, layer: Layer, taken: Collection[int]) -> None:
        """Raise `ConfigurationError` where a layer takes what its stage does not get, or comes before an earlier stage has ended."""
        layers, lasts = self.staged.layers, self.staged._last
        for stage in range(layer.stage):
            if lasts[stage] not in self.found:
                raise ConfigurationError(
                    f"{layer.name} is on stage {layer.stage} of the pipeline, but the model calls it before "
                    f"{layers[lasts[stage]].name} of stage {stage}. Layers are put on stages in the order in which the model registers "
                    "them: register them in the order of their calls, or name other beginnings of stages."
                )
        passed = lasts.get(layer.stage - 1)
        for index in sorted(taken):
            if layers[index].stage < layer.stage and index != passed:
                raise ConfigurationError(
                    f"{layer.name} is on stage {layer.stage} of the pipeline, and takes what {layers[index].name} on stage "
                    f"{layers[index].stage} computes. A stage gets the output of the last layer before it alone: name other beginnings "
                    "of stages."
                )


@dataclass(slots=True)
class _StageRun:
    """A forward that computes the layers of one stage."""

    staged: StagedModel
    stage: int
    shapes: dict[int, OutputShape]
    received: Sequence[Tensor]
    sent: Any = None

    def output(self, index: int, call: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        staged = self.staged
        layer = staged.layers[index]
        if layer.stage > self.stage:
            raise _StageEnd
        if layer.stage < self.stage:
            shape = self.shapes.get(index)
            if shape is None:
                raise ConfigurationError(f"{layer.name} was called in one batch and not in another of the same shapes.")
            return shape.filled(self.received if index == staged._last[self.stage - 1] else shape.tensors)
        found = call(*arguments, **keywords)
        if index == staged._last[self.stage]:
            self.sent = found
        return found


class Stage(Module):
    """The layers of a stage; its forward is the model's, for a part by number; on the last stage `finish` makes its output."""

    def __init__(self, staged: StagedModel, index: int) -> None:
        super().__init__()
        self.staged, self.index = staged, index
        self.parts: Sequence[Inputs] = ()
        self.finish: Callable[[Any, int], Any] | None = None
        for layer in staged.layers:
            if layer.stage == index:
                self.add_module(layer.name.replace(".", "/"), layer.module)

    def forward(self, *received: Tensor, number: Any) -> Any:
        """The output of a part, or the tensors for the next stage."""
        part = int(number)
        output = self.staged.compute(self.index, self.parts[part], received)
        if self.index == self.staged.count - 1:
            return output if self.finish is None else self.finish(output, part)
        return tuple(output)


def move_weights(parts: Iterable[Module], device: torch.device | str, kept: Collection[int] = ()) -> None:
    """Put modules' own weights and buffers on a device, but the weights, by `id`, that are kept; what is tied stays tied."""
    moved: dict[Parameter, Parameter] = {}
    for part in parts:
        for name, weight in part._parameters.items():
            if weight is not None and id(weight) not in kept:
                if weight not in moved:
                    moved[weight] = Parameter(weight.detach().to(device), weight.requires_grad)
                part._parameters[name] = moved[weight]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)


def _intercept(module: Module, call: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
    """Have a function make the calls of a module; it gets the module's own call, which runs hooks, and the arguments."""
    former = type(module)

    def through(self: Module, *arguments: Any, **keywords: Any) -> Any:
        return call(partial(former.__call__, self), arguments, keywords)

    body = {"__call__": through, "__module__": former.__module__, "__doc__": former.__doc__}
    module.__class__ = type(former.__name__, (former,), body)


def _without_numbers(module: Module, device: torch.device) -> Module:
    """A copy of a module whose weights and buffers are absent tensors."""
    memo: dict[int, Any] = {
        id(tensor): AbsentTensor(tensor.detach().to("meta"), device)
        for tensor in [*module.parameters(), *module.buffers()]
    }
    twin: Module = deepcopy(module, memo)
    return twin


# A batch in parts along its first dimension, and the outputs of the parts as that of the whole


def batch_size(inputs: Any) -> int:
    """The number of samples: the length of the first tensor that has a dimension."""
    found = next((leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor) and leaf.ndim), None)
    if found is None:
        raise DataError(
            "A model that is split into stages was called without a tensor whose first dimension is the samples'. Pass a batch that has "
            "one on all processes."
        )
    return len(found)


def microbatches(inputs: Any, count: int) -> list[Any]:
    """The inputs in so many parts, at most one a sample; tensors are cut along dimension 0, other things go to every part."""
    size = batch_size(inputs)
    leaves, structure = tree_flatten(inputs)
    count = min(count, size)
    cut = [
        leaf.tensor_split(count) if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size else [leaf] * count
        for leaf in leaves
    ]
    return [tree_unflatten(list(part), structure) for part in zip(*cut, strict=True)]


def merged(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The outputs of parts as the whole batch's: tensors joined along dimension 0, numbers averaged over samples, else the first's."""

    def joined(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        if leaves[0].ndim:
            return torch.cat(leaves)
        weights = torch.tensor(sizes, dtype=torch.float32, device=leaves[0].device)
        return ((torch.stack(leaves) * (weights / weights.sum())).sum()).to(leaves[0].dtype)

    return tree_map(joined, *outputs)


def output_on_all(output: Any, source: int, group: Any, device: torch.device) -> Any:
    """A rank's output on all processes of a group; objects in it that are no plain values, such as a cache, stay with that rank."""

    def described(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        return leaf if isinstance(leaf, (bool, int, float, str)) else None

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensor = leaf.detach().contiguous() if is_source else torch.empty_like(leaf, device=device)
        dist.broadcast(tensor, source, group=group)
        return tensor

    is_source = dist.get_rank() == source
    held = [tree_map(described, output)]
    dist.broadcast_object_list(held, source, group=group)
    return tree_map(filled, output if is_source else held[0])
