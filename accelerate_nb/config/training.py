"""Settings of the `Accelerator` in each worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from accelerate_nb.config.options import fsdp, parallelism
from accelerate_nb.config.settings import setting, settings
from accelerate_nb.config.xla_mesh import MeshAxes


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings that a launcher gives to the `Accelerator`; `None` leaves them to the `Accelerator`'s own arguments."""

    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] | None = setting(
        None,
        help="The type to compute in where 16 bits are safe; with 'fp8' linear layers use 8 bits, by torchao.",
        variables=["ACCELERATE_MIXED_PRECISION"],
        group="precision",
    )
    gradient_accumulation_steps: int | None = setting(
        None,
        minimum=1,
        help="Number of batches for one optimizer step.",
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
        help="The backend of torch.compile for prepared models; 'inductor' is torch's default, 'openxla' is for XLA devices.",
        variables=["ACCELERATE_DYNAMO_BACKEND"],
        group="compiling",
    )
    dynamo_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = setting(
        None,
        help="The optimization mode of torch.compile.",
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
        None, help="Show each epoch of a prepared loader as a bar of its rank, in the panel only.", group="shown"
    )

    xla_mesh: Annotated[str, MeshAxes()] | None = setting(
        None,
        help="Let one process drive all XLA devices as one mesh (SPMD): 'fsdp', 'data', or with sizes 'data=2,fsdp=4'.",
        group="training",
        advanced=True,
    )

    strategy: Literal["ddp", "fsdp"] | None = setting(
        None,
        help="How training is spread: a copy of the model on each process ('ddp'), or its weights in shards (FSDP2, 'fsdp').",
        group="sharding",
    )
    fsdp_config: Annotated[Mapping[str, Any], fsdp.OPTIONS] | None = setting(
        None,
        help="Options of strategy='fsdp', by the keys of Accelerate's fsdp_config; as there, what is left out has the default "
        "of `accelerate launch`.",
        group="sharding",
        advanced=True,
    )
    parallelism_config: Annotated[Mapping[str, Any], parallelism.DEGREES] | None = setting(
        None,
        help="Over how many processes the model is copied (dp_replicate_size) and sharded (dp_shard_size).",
        group="sharding",
        advanced=True,
    )

    def environ(self) -> dict[str, str]:
        """The variables through which an `Accelerator` gets these settings; unset ones are left out."""
        of_strategy = {"strategy", "fsdp_config", "parallelism_config"}
        # under the names that Accelerate reads, where it has one
        names = {
            (*setting.variables[1:], *setting.variables)[0]: setting.name
            for setting in settings(TrainingConfig)
            if setting.name not in of_strategy
        }
        values = {variable: getattr(self, name) for variable, name in names.items()}
        texts = {
            variable: str(value).lower() if isinstance(value, bool) else str(value)
            for variable, value in values.items()
            if value is not None
        }
        return {**texts, **self._environ_of_strategy()}

    def _environ_of_strategy(self) -> dict[str, str]:
        found = {} if self.parallelism_config is None else parallelism.variables(self.parallelism_config)
        if self.strategy == "fsdp":
            return {**found, **fsdp.variables(self.fsdp_config)}
        # one that the launching process has in its environment would reach the workers too
        return found if self.strategy is None else {**found, "ACCELERATE_USE_FSDP": "false"}
