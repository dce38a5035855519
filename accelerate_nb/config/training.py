"""Settings of the `Accelerator` in each worker."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from accelerate_nb.config.options import deepspeed, fsdp, megatron, parallelism
from accelerate_nb.config.settings import setting, settings

# The strategies that have options of their own.
STRATEGIES = (fsdp.STRATEGY, deepspeed.STRATEGY, megatron.STRATEGY)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings that a launcher gives to the `Accelerator`; `None` leaves them to the `Accelerator`'s own arguments."""

    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] | None = setting(
        None,
        label="Precision",
        help="The type to compute in where 16 bits are safe; with 'fp8' linear layers use 8 bits, by torchao.",
        variables=["ACCELERATE_MIXED_PRECISION"],
        group="precision",
    )
    gradient_accumulation_steps: int | None = setting(
        None,
        minimum=1,
        label="Gradient accumulation",
        help="Number of batches for one optimizer step.",
        variables=["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"],
        group="training",
    )
    debug: bool | None = setting(
        None,
        label="Check collectives",
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
        label="Compile backend",
        help="The backend of torch.compile for prepared models; 'inductor' is torch's default, 'openxla' is for XLA devices.",
        variables=["ACCELERATE_DYNAMO_BACKEND"],
        group="compiling",
    )
    dynamo_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = setting(
        None,
        label="Compile mode",
        help="The optimization mode of torch.compile.",
        variables=["ACCELERATE_DYNAMO_MODE"],
        group="compiling",
        advanced=True,
    )
    dynamo_use_fullgraph: bool | None = setting(
        None,
        label="Compile as one graph",
        help="Refuse a model that can't be compiled as one graph.",
        variables=["ACCELERATE_DYNAMO_USE_FULLGRAPH"],
        group="compiling",
        advanced=True,
    )
    dynamo_use_dynamic: bool | None = setting(
        None,
        label="Compile for any shape",
        help="Compile once for tensors of any shape.",
        variables=["ACCELERATE_DYNAMO_USE_DYNAMIC"],
        group="compiling",
        advanced=True,
    )
    dynamo_use_regional_compilation: bool | None = setting(
        None,
        label="Compile repeated blocks",
        help="Compile the repeated blocks of a model one by one: the first step begins sooner.",
        variables=["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"],
        group="compiling",
        advanced=True,
    )
    loader_progress: bool | None = setting(
        None, help="Show each epoch of a prepared loader as a bar of its rank, in the panel only.", group="shown"
    )

    autolog: bool | None = setting(
        None,
        label="Automatic charts",
        help="Chart also what was not logged: numbers beside tqdm bars, logs of Trainer and others, a step's time, memory "
        "and gradient norm. On unless it is switched off.",
        group="shown",
    )

    strategy: Literal["ddp", "fsdp", "deepspeed", "megatron"] | None = setting(
        None,
        help="How training is spread: a copy of the model on each process ('ddp'), or its weights in shards (FSDP2, 'fsdp', or the "
        "package DeepSpeed, 'deepspeed'), or a model of megatron-core in parts ('megatron').",
        group="sharding",
    )
    fsdp_config: Annotated[Mapping[str, Any], fsdp.OPTIONS] | None = setting(
        None,
        label="FSDP options",
        help="Options of strategy='fsdp', by the keys of Accelerate's fsdp_config; as there, what is left out has the default "
        "of `accelerate launch`.",
        group="sharding",
        advanced=True,
    )
    deepspeed_config: Annotated[Mapping[str, Any], deepspeed.OPTIONS] | None = setting(
        None,
        label="DeepSpeed options",
        help="Options of strategy='deepspeed', by the keys of Accelerate's deepspeed_config: zero_stage, deepspeed_config_file, "
        "offload_optimizer_device, ...",
        group="sharding",
        advanced=True,
    )
    megatron_lm_config: Annotated[Mapping[str, Any], megatron.OPTIONS] | None = setting(
        None,
        label="Megatron options",
        help="Options of strategy='megatron', by the keys of Accelerate's megatron_lm_config: tp_degree, pp_degree, num_micro_batches, "
        "gradient_clipping, ...",
        group="sharding",
        advanced=True,
    )
    parallelism_config: Annotated[Mapping[str, Any], parallelism.DEGREES] | None = setting(
        None,
        label="Mesh",
        help="Over how many processes the model is copied (dp_replicate_size), sharded (dp_shard_size), split along the width of its "
        "layers (tp_size), in stages of layers (pp_size), or along sequences (cp_size; sp_size by DeepSpeed).",
        group="sharding",
        advanced=True,
    )

    def environ(self) -> dict[str, str]:
        """The variables through which an `Accelerator` gets these settings; unset ones are left out."""
        of_strategy = {"strategy", "fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config"}
        values = {
            setting.worker_variable: getattr(self, setting.name)
            for setting in settings(TrainingConfig)
            if setting.name not in of_strategy
        }
        texts = {
            variable: str(value).lower() if isinstance(value, bool) else str(value)
            for variable, value in values.items()
            if value is not None
        }
        if self.parallelism_config is not None:
            texts |= parallelism.variables(self.parallelism_config)
        if self.strategy is not None:
            # one that the launching process has in its environment would reach the workers too
            texts |= dict.fromkeys((strategy.variable for strategy in STRATEGIES), "false")
        for strategy in STRATEGIES:
            if strategy.name == self.strategy:
                texts |= strategy.variables(getattr(self, strategy.key))
        return texts
