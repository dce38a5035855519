"""Pipelines without one of the things that stages tell each other: the contract of strategies has to notice each."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accelerate_nb.runtime.operations import sharded_tensors
from accelerate_nb.runtime.strategies.base import PrepareRequest
from accelerate_nb.runtime.strategies.pipeline.strategy import PipelineParallel
from tests.runtime.strategies.fsdp_without_reductions import with_own_parts


class WithoutGradients(PipelineParallel):
    """A stage gets zeros for the gradients that the next one computes of what it sent."""

    def prepare_model(self, request: PrepareRequest) -> nn.Module:
        model: Any = super().prepare_model(request)
        for stage in model.stages.values():
            stage.register_forward_hook(_without_gradients)
        return model


def _without_gradients(_stage: nn.Module, _received: Any, output: Any) -> None:
    # a last stage returns its loss
    for tensor in output if isinstance(output, tuple) else ():
        if tensor.requires_grad:
            tensor.register_hook(torch.zeros_like)


class WithoutNorm(PipelineParallel):
    """Each stage clips its gradients by the norm of its own."""

    def gradient_norm(self, weights: Sequence[Tensor], norm_type: float) -> Tensor:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        return sharded_tensors.norm(gradients, norm_type, self.world.device)


class WithoutOverflow(PipelineParallel):
    """Each stage leaves a step out when its own gradients overflowed."""

    def _share_overflow(self, overflow: Tensor) -> None:
        pass


class WithoutMean(PipelineParallel):
    """Each pipeline has its shards of its own gradients."""

    def prepare_model(self, request: PrepareRequest) -> nn.Module:
        model: Any = super().prepare_model(request)
        for stage in model.stages.values():
            with_own_parts(stage)
        return model


class WithoutSumOfShared(PipelineParallel):
    """Each stage has its own gradients of weights that several stages have."""

    def prepare_model(self, request: PrepareRequest) -> nn.Module:
        model: Any = super().prepare_model(request)
        model.shared.groups = {}
        return model
