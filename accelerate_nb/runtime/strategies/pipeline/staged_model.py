"""A model whose own forward computes one stage at a time, with absent tensors for what other stages compute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from accelerate_nb.errors import ConfigurationError, StateError
from accelerate_nb.runtime.strategies.pipeline.absent_tensor import AbsentTensor, absent_in
from accelerate_nb.runtime.strategies.pipeline.stage_plan import Layer

# Positional and keyword arguments of a model.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class OutputShape:
    """A layer's output: its leaves, with absent tensors in place of tensors, and how they are nested."""

    leaves: Sequence[Any]
    structure: TreeSpec

    @classmethod
    def of(cls, output: Any) -> OutputShape:
        return cls(*tree_flatten(output))

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
    """
    A model that is cut into stages, of which this process holds some.

    The model's own forward runs on every stage. A layer of an earlier stage returns absent tensors, and the last of them what was
    received from there; the forward ends where a layer of a later stage would begin. So masks, positions and whatever else a model
    computes beside its layers are there on each stage, and nothing has to be traced.
    """

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

    def layers_on(self, stage: int) -> list[Layer]:
        """The layers of a stage."""
        return [layer for layer in self.layers if layer.stage == stage]

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
        return _key(inputs), self.model.training

    def compute(self, stage: int, inputs: Inputs, received: Sequence[Tensor] = ()) -> Any:
        """The model's output, from the last stage; from another one the tensors for the next."""
        run = _StageRun(self, stage, self.shapes(inputs), received)
        output = self._run_model(run, inputs)
        if stage < self.count - 1:
            return run.tensors_to_send()
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
        self.found[index] = OutputShape.of(output)
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

    def tensors_to_send(self) -> list[Tensor]:
        """The tensors of the last layer's output, in the dtypes that the next stage expects."""
        last = self.staged._last[self.stage]
        tensors = [leaf for leaf in tree_flatten(self.sent)[0] if isinstance(leaf, Tensor)]
        return [
            tensor.to(shape.dtype).contiguous()
            for tensor, shape in zip(tensors, self.shapes[last].tensors, strict=True)
        ]


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


def _key(inputs: Inputs) -> Any:
    leaves, structure = tree_flatten(inputs)
    shapes = [
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf if _is_plain(leaf) else type(leaf)
        for leaf in leaves
    ]
    return str(structure), tuple(shapes)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None)))
