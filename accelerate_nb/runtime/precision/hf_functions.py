"""Mixed precision for code that uses its parts, not an `Accelerator`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate_nb.runtime.compat.enums import DistributedType
from accelerate_nb.runtime.compat.kwargs_handlers import AutocastKwargs
from accelerate_nb.runtime.world.accelerator_state import AcceleratorState

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """A block in which operations choose the precision of the process's `Accelerator`; one that does nothing unless `native_amp`."""
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    options = autocast_kwargs or AutocastKwargs()
    return torch.autocast(
        state.device.type,
        dtype=_TYPES.get(str(state.mixed_precision)),
        enabled=options.enabled,
        cache_enabled=options.cache_enabled,
    )


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """A scaler of losses for the accelerator of this machine, CUDA's where there is none; FSDP's own for sharded weights."""
    if distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(**kwargs)
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.amp.GradScaler("cuda" if found is None else found.type, **kwargs)
