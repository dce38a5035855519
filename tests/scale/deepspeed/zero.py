"""The contract's training by ZeRO's stages."""

from typing import Any

from accelerate_nb.utils import DeepSpeedPlugin
from tests.runtime.strategies.contract import ACCUMULATION

# Between two steps: an engine can't give back the gradients of a window.
SAVED_AFTER = 2 * ACCUMULATION


def by_stage(stage: int, **settings: Any) -> dict[str, Any]:
    """The arguments of `Accelerator`."""
    return {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=stage, gradient_clipping=0.0, **settings)}
