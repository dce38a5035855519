"""The names of a checkpoint's files, which are Accelerate's."""

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"

# Ours alone: where each loader stood. Accelerate passes it over.
POSITIONS_NAME = "positions"
CUSTOM_NAME = "custom_checkpoint"


def numbered_name(stem: str, index: int, ending: str) -> str:
    """The name of the file for object number `index`; the first one carries no number."""
    return f"{stem}_{index}.{ending}" if index else f"{stem}.{ending}"
