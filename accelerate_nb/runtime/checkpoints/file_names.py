"""The names of a checkpoint's files, which are Accelerate's."""

import re
from pathlib import Path

# What `accelerate.utils.constants` offers.
__all__ = [
    "MODEL_NAME", "OPTIMIZER_NAME", "RNG_STATE_NAME", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME", "SAFE_WEIGHTS_PATTERN_NAME", "SAMPLER_NAME", "SCALER_NAME", "SCHEDULER_NAME",
    "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME", "WEIGHTS_PATTERN_NAME",
]  # fmt: skip

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
# Of sharded models: a folder of parts, `pytorch_model_fsdp_0`, or a complete file, `pytorch_model_fsdp.bin`.
SHARDED_MODEL_NAME = f"{MODEL_NAME}_fsdp"
# Of a model of megatron-core: a folder in the format of its own checkpoints, `pytorch_model_megatron_0`.
MEGATRON_MODEL_NAME = f"{MODEL_NAME}_megatron"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"
MEGATRON_RNG_STATE_NAME = f"megatron_{RNG_STATE_NAME}"

# Ours alone: where each loader stood, and what a window of accumulation had gathered. Accelerate passes them over.
POSITIONS_NAME = "positions"
GRADIENTS_NAME = "gradients"
CUSTOM_NAME = "custom_checkpoint"
# Ours alone too: which files belong to the checkpoint, and what is in them.
MANIFEST_NAME = "checkpoint.json"
# Of a stateful loader; Accelerate writes it on every process to one file.
LOADER_NAME = "dl_state_dict"

_OURS = re.compile(
    r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt"
    r"|(pytorch_model_fsdp|pytorch_model_megatron|optimizer)_\d+|pytorch_model_fsdp(_\d+)?\.bin|(megatron_)?random_states_\d+\.pkl|(positions|gradients)_\d+\.pkl|custom_checkpoint_\d+\.pkl|checkpoint\.json"
)


def is_ours(name: str) -> bool:
    """Whether a file name is one that a checkpoint writes."""
    return _OURS.fullmatch(name) is not None


def has_named_states(folder: Path) -> bool:
    """Whether a checkpoint's weights are those of a sharded model, and what optimizers remember stands under names of weights."""
    return (folder / f"{SHARDED_MODEL_NAME}_0").is_dir() or (folder / numbered(SHARDED_MODEL_NAME, 0)).is_file()


def numbered(stem: str, index: int, suffix: str = "bin") -> str:
    """The name of the file for object number `index`; the first one carries no number."""
    return f"{stem}_{index}.{suffix}" if index else f"{stem}.{suffix}"


def weights(index: int, *, safe: bool) -> str:
    """The name of the file for the weights of model number `index`."""
    return numbered(SAFE_MODEL_NAME, index, "safetensors") if safe else numbered(MODEL_NAME, index)


def of_rank(stem: str, rank: int) -> str:
    """The name of a process's own file."""
    return f"{stem}_{rank}.pkl"
