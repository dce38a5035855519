"""The forward of all parts of a batch, and its backward when a loss asks for it (GPipe, arXiv:1811.06965): any training loop works."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from accelerate_nb.errors import StateError
from accelerate_nb.runtime.strategies.pipeline.exchange import StageExchange
from accelerate_nb.runtime.strategies.pipeline.microbatches import batch_size, merged
from accelerate_nb.runtime.strategies.pipeline.stage import Stage
from accelerate_nb.runtime.strategies.pipeline.staged_model import Inputs


class TwoPhaseRun:
    """A batch's way through the stages: forward at once, and backward from the gradients of its outputs."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        exchange: StageExchange,
        parts: Sequence[Inputs],
        around_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.stages, self.exchange, self.parts, self.around_backward = stages, exchange, parts, around_backward
        self.last = next(iter(stages.values())).staged.count - 1
        self._kept: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._roots: list[Any] = []
        self._merged: list[Tensor] = []

    def forward(self, *, on_all: bool = True) -> Any:
        """The model's output for the whole batch, on all processes of the pipeline, or on the last stage's, and `None` on others."""
        outputs: list[Any] = []
        for index, stage in sorted(self.stages.items()):
            stage.parts = self.parts
            for number in range(len(self.parts)):
                output = self._forward_part(index, stage, number)
                if index == self.last:
                    outputs.append(output)
        self.exchange.finish()
        output = self._merge(outputs) if outputs else None
        if not on_all:
            return output
        output = self._output_on_all(output)
        return self._with_backward(output) if torch.is_grad_enabled() else output

    def _forward_part(self, index: int, stage: Stage, number: int) -> Any:
        received: list[Tensor] = []
        if index > 0:
            shape = stage.staged.received_shape(index, self.parts[number])
            received = self.exchange.receive(shape.tensors, index - 1, index, number)
        for tensor in received:
            if tensor.is_floating_point():
                tensor.requires_grad_(torch.is_grad_enabled())
        output = stage(*received, number=number)
        if index < self.last:
            self.exchange.send([tensor.detach() for tensor in output], index, index + 1, number)
        if torch.is_grad_enabled():
            tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
            self._kept[index, number] = received, tensors
        return output

    def _merge(self, outputs: Sequence[Any]) -> Any:
        """The whole batch's output, from copies of the parts' that have a graph of their own."""
        self._roots = [tree_map(_root, output) for output in outputs]
        return merged(self._roots, [batch_size(part) for part in self.parts])

    def _output_on_all(self, output: Any) -> Any:
        """The last stage's output, which the others get without numbers of which gradients are needed."""
        leaves, structure = tree_flatten(output)
        header = tree_unflatten([_Header.of(leaf) for leaf in leaves], structure)
        is_last = self.last in self.stages
        header = self.exchange.broadcast_object(header, self.last)
        headers, found = tree_flatten(header)
        values = leaves if is_last else [one.empty(self.exchange.device) for one in headers]
        self._merged = [value for value in values if isinstance(value, Tensor)]
        for tensor in self._merged:
            self.exchange.broadcast(tensor.detach().contiguous() if is_last else tensor, self.last)
        return output if is_last else tree_unflatten(values, found)

    def _with_backward(self, output: Any) -> Any:
        leaves, structure = tree_flatten(output)
        trigger = torch.zeros((), requires_grad=True)
        indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        connected = _Backward.apply(  # type: ignore[no-untyped-call]
            self, trigger, *[leaves[index].detach() for index in indices]
        )
        self._merged = [leaves[index] for index in indices]
        for index, leaf in zip(indices, connected, strict=True):
            leaves[index] = leaf
        return tree_unflatten(leaves, structure)

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Add up the gradients of this process's weights; all processes of the pipeline call it."""
        if not self._kept:
            raise StateError(
                "A second backward went through a model that is split into stages. Call the model once more before it."
            )
        with self.around_backward():
            for index, stage in sorted(self.stages.items(), reverse=True):
                if index == self.last:
                    self._backward_merged(gradients)
                for number in range(len(self.parts)):
                    with stage.backward_of_part(is_last=number == len(self.parts) - 1):
                        self._backward_part(index, number)
                stage.end_backward()
            self.exchange.finish()

    def _backward_merged(self, gradients: Sequence[Tensor | None]) -> None:
        """Bring the gradients of the whole batch's output to the parts' outputs."""
        pairs = [
            (output, gradient)
            for output, gradient in zip(self._merged, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        self._merged = []

    def _backward_part(self, index: int, number: int) -> None:
        received, outputs = self._kept.pop((index, number))
        if index == self.last:
            roots = [leaf for leaf in tree_flatten(self._roots[number])[0] if isinstance(leaf, Tensor)]
            gradients = [root.grad for root in roots]
            self._roots[number] = None
        else:
            floating = [output for output in outputs if output.is_floating_point()]
            arrived = iter(self.exchange.receive(floating, index + 1, index, number))
            gradients = [next(arrived) if output.is_floating_point() else None for output in outputs]
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output.requires_grad and gradient is not None
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        if index > 0:
            back = [
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for tensor in received
                if tensor.is_floating_point()
            ]
            self.exchange.send(back, index, index - 1, number)


class _Backward(torch.autograd.Function):
    """The outputs as they are, whose gradients go on through the stages."""

    @staticmethod
    def forward(ctx: Any, run: TwoPhaseRun, _trigger: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.run.backward(gradients)
        return (None, None, *[None] * len(gradients))


class _Header:
    """The description of a leaf of an output: the shape and dtype of a tensor, or a plain value."""

    def __init__(self, shape: tuple[int, ...] | None, value: Any) -> None:
        self.shape, self.value = shape, value

    @classmethod
    def of(cls, leaf: Any) -> _Header:
        if isinstance(leaf, Tensor):
            return cls(tuple(leaf.shape), leaf.dtype)
        # other objects, such as a cache of keys and values, stay with the last stage
        return cls(None, leaf if isinstance(leaf, (bool, int, float, str, type(None))) else None)

    def empty(self, device: torch.device) -> Any:
        return self.value if self.shape is None else torch.empty(self.shape, dtype=self.value, device=device)


def _root(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)
