"""The names of torch's FSDP that its settings are made of, which are loaded when one is used: that takes half a second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import (
        BackwardPrefetch as BackwardPrefetch,
        CPUOffload as CPUOffload,
        CPUOffloadPolicy as CPUOffloadPolicy,
        FullOptimStateDictConfig as FullOptimStateDictConfig,
        FullStateDictConfig as FullStateDictConfig,
        MixedPrecision as MixedPrecision,
        MixedPrecisionPolicy as MixedPrecisionPolicy,
        OffloadPolicy as OffloadPolicy,
        ShardedOptimStateDictConfig as ShardedOptimStateDictConfig,
        ShardedStateDictConfig as ShardedStateDictConfig,
        ShardingStrategy as ShardingStrategy,
        StateDictType as StateDictType,
    )
    from torch.distributed.fsdp.wrap import (
        size_based_auto_wrap_policy as size_based_auto_wrap_policy,
        transformer_auto_wrap_policy as transformer_auto_wrap_policy,
    )


def __getattr__(name: str) -> Any:
    from torch.distributed import fsdp
    from torch.distributed.fsdp import wrap

    return getattr(wrap if name.endswith("_policy") else fsdp, name)
