"""FSDP without one of its reductions: the contract of strategies has to notice each."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from accelerate_nb.runtime.operations.sharded_tensors import local
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.precision.registry import PrecisionOptions
from accelerate_nb.runtime.strategies.base import PrepareRequest
from accelerate_nb.runtime.strategies.fsdp.strategy import FSDP


class WithoutReduceScatter(FSDP):
    """Each process keeps its part of its own gradients."""

    def prepare_model(self, request: PrepareRequest) -> nn.Module:
        return with_own_parts(super().prepare_model(request))


def with_own_parts(model: nn.Module) -> nn.Module:
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_reduce_scatter(_OwnPart())
    return model


class _OwnPart:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        # what the sum were if all processes had sent the same
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()] * group.size())


class WithoutAllReduce(FSDP):
    """Copies of the parts keep the gradients of their own processes."""

    def prepare_model(self, request: PrepareRequest) -> nn.Module:
        model = super().prepare_model(request)
        assert isinstance(model, FSDPModule)
        model.set_requires_all_reduce(False)
        return model


class WithoutNorm(FSDP):
    """Each process clips its part of the gradients by the norm of this part."""

    def clip_norm(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        gradients = [local(weight.grad) for weight in parameters if weight.grad is not None]
        norm = nn.utils.get_total_norm(gradients, norm_type)
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1))
        return norm


class WithoutOverflow(FSDP):
    """Each process leaves a step out when its own part of the gradients overflowed."""

    def choose_precision(self, name: str, options: PrecisionOptions) -> Precision:
        precision = super().choose_precision(name, options)
        assert options.scaling is not None
        precision.scaler = _OwnScaler(self.world.device.type, **options.scaling.to_kwargs())
        return precision


class _OwnScaler(torch.amp.GradScaler):
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
        return {found_inf.device: found_inf}
