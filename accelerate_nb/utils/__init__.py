"""The door `accelerate.utils`: what Hugging Face offers under this module name, as far as it is here."""

from accelerate_nb.runtime.checkpoints.names import (
    MODEL_NAME as MODEL_NAME,
    OPTIMIZER_NAME as OPTIMIZER_NAME,
    RNG_STATE_NAME as RNG_STATE_NAME,
    SAFE_MODEL_NAME as SAFE_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME,
    SAMPLER_NAME as SAMPLER_NAME,
    SCALER_NAME as SCALER_NAME,
    SCHEDULER_NAME as SCHEDULER_NAME,
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME,
)
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
    PrecisionType as PrecisionType,
    RNGType as RNGType,
)
from accelerate_nb.runtime.memory import (
    find_executable_batch_size as find_executable_batch_size,
    release_memory as release_memory,
)
from accelerate_nb.runtime.saving import save as save, wait_for_everyone as wait_for_everyone
from accelerate_nb.runtime.unwrapping import extract_model_from_parallel as extract_model_from_parallel
from accelerate_nb.utils.tqdm import tqdm as tqdm
