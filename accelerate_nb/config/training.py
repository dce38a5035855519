"""The wish for how the `Accelerator` in each worker trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accelerate_nb.config.fields import setting


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a launcher asks of the `Accelerator`; `None` leaves it to the `Accelerator`'s own arguments."""

    mixed_precision: Literal["no", "fp16", "bf16"] | None = setting(
        None,
        help="The numbers to compute with, where 16 bits are safe.",
        variables=["ACCELERATE_MIXED_PRECISION"],
        later=["fp8"],
        group="precision",
    )
    gradient_accumulation_steps: int | None = setting(
        None,
        minimum=1,
        help="How many batches make one optimizer step.",
        variables=["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"],
        group="training",
    )
    debug: bool | None = setting(
        None,
        help="Compare shapes on all ranks before each collective operation.",
        variables=["ACCELERATE_DEBUG_MODE"],
        group="training",
    )
    loader_progress: bool | None = setting(
        None,
        help="Show each epoch of a prepared loader as a bar of its rank, in the panel only.",
        group="shown",
    )

    def environ(self) -> dict[str, str]:
        """The variables that say this to an `Accelerator`; what was not said is not among them."""
        asked = {
            "ACCELERATE_MIXED_PRECISION": self.mixed_precision,
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": self.gradient_accumulation_steps,
            "ACCELERATE_DEBUG_MODE": None if self.debug is None else str(self.debug).lower(),
            "ACCELERATE_NB_LOADER_PROGRESS": None
            if self.loader_progress is None
            else str(self.loader_progress).lower(),
        }
        return {name: str(value) for name, value in asked.items() if value is not None}
