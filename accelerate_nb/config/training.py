"""The wish for how the `Accelerator` in each worker trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from accelerate_nb.config.fields import setting
from accelerate_nb.config.mesh import Axes


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
    dynamo_backend: (
        Literal[
            "no",
            "eager",
            "aot_eager",
            "inductor",
            "aot_ts_nvfuser",
            "nvprims_nvfuser",
            "cudagraphs",
            "ofi",
            "fx2trt",
            "onnxrt",
            "tensorrt",
            "aot_torchxla_trace_once",
            "torchxla_trace_once",
            "openxla",
            "tvm",
            "hpu_backend",
            "neuron",
        ]
        | None
    ) = setting(
        None,
        help="What compiles prepared models, by torch.compile; 'inductor' is torch's own choice, 'openxla' that for XLA devices.",
        variables=["ACCELERATE_DYNAMO_BACKEND"],
        group="compiling",
    )
    dynamo_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = setting(
        None,
        help="What the compiler makes the most of.",
        variables=["ACCELERATE_DYNAMO_MODE"],
        group="compiling",
        advanced=True,
    )
    dynamo_use_fullgraph: bool | None = setting(
        None,
        help="Refuse a model that can't be compiled as one graph.",
        variables=["ACCELERATE_DYNAMO_USE_FULLGRAPH"],
        group="compiling",
        advanced=True,
    )
    dynamo_use_dynamic: bool | None = setting(
        None,
        help="Compile once for tensors of any shape.",
        variables=["ACCELERATE_DYNAMO_USE_DYNAMIC"],
        group="compiling",
        advanced=True,
    )
    dynamo_use_regional_compilation: bool | None = setting(
        None,
        help="Compile the repeated blocks of a model one by one: the first step begins sooner.",
        variables=["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"],
        group="compiling",
        advanced=True,
    )
    loader_progress: bool | None = setting(
        None,
        help="Show each epoch of a prepared loader as a bar of its rank, in the panel only.",
        group="shown",
    )

    xla_mesh: Annotated[str, Axes()] | None = setting(
        None,
        help="Let one process drive all XLA devices as one mesh (SPMD): 'fsdp', 'data', or with sizes 'data=2,fsdp=4'.",
        group="training",
        advanced=True,
    )

    def environ(self) -> dict[str, str]:
        """The variables that say this to an `Accelerator`; what was not said is not among them."""
        asked = {
            "ACCELERATE_MIXED_PRECISION": self.mixed_precision,
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": self.gradient_accumulation_steps,
            "ACCELERATE_DEBUG_MODE": self.debug,
            "ACCELERATE_DYNAMO_BACKEND": self.dynamo_backend,
            "ACCELERATE_DYNAMO_MODE": self.dynamo_mode,
            "ACCELERATE_DYNAMO_USE_FULLGRAPH": self.dynamo_use_fullgraph,
            "ACCELERATE_DYNAMO_USE_DYNAMIC": self.dynamo_use_dynamic,
            "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": self.dynamo_use_regional_compilation,
            "ACCELERATE_NB_LOADER_PROGRESS": self.loader_progress,
            "ACCELERATE_NB_XLA_MESH": self.xla_mesh,
        }
        return {name: _said(value) for name, value in asked.items() if value is not None}


def _said(value: str | int) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
