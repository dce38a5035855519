"""The door `accelerate.utils.dataclasses`: the runtime's settings under Hugging Face's module name."""

from accelerate_nb.runtime.handlers import (
    AutocastKwargs as AutocastKwargs,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
    ProjectConfiguration as ProjectConfiguration,
)
from accelerate_nb.runtime.kinds import (
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedType as DistributedType,
    LoggerType as LoggerType,
    PrecisionType as PrecisionType,
    RNGType as RNGType,
)
