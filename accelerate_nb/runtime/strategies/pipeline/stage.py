"""One stage of a pipeline as a module: the layers that a process trains, and their part of the model's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from accelerate_nb.runtime.strategies.pipeline.staged_model import Inputs, StagedModel


class Stage(Module):
    """
    The layers of a stage; its forward is the model's, from what was received to what is sent.

    `parts` are the inputs of the parts of a batch, of which the forward gets a number. On the last stage `finish` makes of a part's
    output what the forward returns.
    """

    def __init__(self, staged: StagedModel, index: int) -> None:
        super().__init__()
        self.staged, self.index = staged, index
        self.parts: Sequence[Inputs] = ()
        self.finish: Callable[[Any, int], Any] | None = None
        self.shares_gradients = True
        for layer in staged.layers_on(index):
            self.add_module(layer.name.replace(".", "/"), layer.module)

    def forward(self, *received: Tensor, number: Any) -> Any:
        """The output of a part, or the tensors for the next stage."""
        part = int(number)
        output = self.staged.compute(self.index, self.parts[part], received)
        if self.index == self.staged.count - 1:
            return output if self.finish is None else self.finish(output, part)
        return tuple(output)

    @contextmanager
    def backward_of_part(self, *, is_last: bool) -> Iterator[None]:
        """A block with the backward of one part; shards exchange gradients in that of the last one."""
        if isinstance(self, FSDPModule):
            self.set_is_last_backward(is_last)
            self.set_reshard_after_backward(is_last)
            self.set_requires_gradient_sync(is_last and self.shares_gradients)
        yield

    def end_backward(self) -> None:
        """Shards exchange gradients again in any backward."""
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(True)
