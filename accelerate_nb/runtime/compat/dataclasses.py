"""Objects that configure an `Accelerator`, and the closed sets of names that they choose from, as Accelerate spells them."""

from __future__ import annotations

import copy
import enum
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from typing import Any

from accelerate_nb.errors import ConfigurationError

# What `accelerate.utils.dataclasses` offers.
__all__ = [
    "AutocastKwargs", "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType", "DataLoaderConfiguration",
    "DistributedDataParallelKwargs", "DistributedType", "DynamoBackend", "FP8BackendType", "GradScalerKwargs",
    "GradientAccumulationPlugin", "InitProcessGroupKwargs", "KwargsHandler", "LoggerType", "PrecisionType",
    "ProjectConfiguration", "RNGType",
]  # fmt: skip


class KnowsItsValues(enum.EnumMeta):
    """Makes `"fp16" in PrecisionType` work on every supported Python."""

    def __contains__(cls, item: object) -> bool:
        members: list[Any] = list(cls.__members__.values())
        return any(item is member or item == member.value for member in members)


class Kind(str, enum.Enum, metaclass=KnowsItsValues):
    """A name out of a closed set; it is its own string."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """All names of the set."""
        return [str(member) for member in cls]


class DistributedType(str, enum.Enum):
    """The type of connection between a run's processes; its value is its name."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"

    @classmethod
    def of(cls, size: int, device: str) -> DistributedType:
        """The kind of a run of `size` processes on devices of a type."""
        if device == "xla":
            return cls.XLA
        if size == 1:
            return cls.NO
        return cls.MULTI_GPU if device == "cuda" else cls(f"MULTI_{device.upper()}")


class PrecisionType(Kind):
    """The precision that a step is computed in."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(Kind):
    """A random number generator that processes can keep equal."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class DDPCommunicationHookType(Kind):
    """The compression of gradients while they travel."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class DynamoBackend(Kind):
    """The compiler of the graphs that `torch.compile` finds."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    OPENXLA = "OPENXLA"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"

    @property
    def is_gone(self) -> bool:
        """Whether torch 2.9 and later don't have it: they know one backend for XLA devices, by another name."""
        return self in (DynamoBackend.AOT_TORCHXLA_TRACE_ONCE, DynamoBackend.TORCHXLA_TRACE_ONCE)


class FP8BackendType(str, enum.Enum):
    """The package that computes in 8-bit floats."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class LoggerType(Kind):
    """A tracker that `log_with` knows by name; `ALL` stands for those that are installed."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class ComputeEnvironment(Kind):
    """The environment that a run takes place in; Amazon's SageMaker is not offered."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class CustomDtype(Kind):
    """A type of numbers that torch has none for, for estimates of a model's memory in it."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


def named(value: Any) -> str:
    """A kind's or a plain string's name."""
    return str(value.value if isinstance(value, enum.Enum) else value)


# ------------------------------------------------------------------------------------------------------------- settings


@dataclass
class KwargsHandler:
    """Arguments for something that the `Accelerator` makes; fields left out may come from the environment."""

    def __post_init__(self) -> None:
        self._fill(os.environ)

    def to_dict(self) -> dict[str, Any]:
        """All fields with their values."""
        return {item.name: copy.deepcopy(getattr(self, item.name)) for item in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """The fields whose values differ from the default."""
        # the handler made without arguments where the environment sets nothing
        plain = object.__new__(type(self))
        for item in fields(self):
            value = item.default_factory() if item.default_factory is not MISSING else item.default
            setattr(plain, item.name, value)
        plain._fill({})
        default = plain.to_dict()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}

    def _fill(self, environment: Mapping[str, str]) -> None:
        """Give the fields that were left open their values."""


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments for `torch.autocast`."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments for `torch.amp.GradScaler`, which fp16 uses."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments for `torch.distributed.init_process_group`; a named backend that the device can't use is replaced, with a warning."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> InitProcessGroupKwargs:
        """A handler that knows whether its backend was named, or is the default."""
        made = super().__new__(cls)
        made.__dict__["names_backend"] = bool(args) or "backend" in kwargs
        return made

    def requested(self) -> dict[str, Any]:
        """The fields whose values differ from the default, and the backend that was named."""
        return {**self.to_kwargs(), **({"backend": self.backend} if self.__dict__.get("names_backend") else {})}

    def _fill(self, environment: Mapping[str, str]) -> None:
        if self.timeout is None:
            # the times that torch itself takes for nccl and for everything else
            self.timeout = timedelta(minutes=10 if self.backend == "nccl" else 30)


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments for `torch.nn.parallel.DistributedDataParallel`, and how gradients are packed while they travel."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_dict(
        self, ignore_keys: Iterable[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """The fields that `DistributedDataParallel` itself takes."""
        return {name: value for name, value in super().to_dict().items() if name not in set(ignore_keys)}

    def register_comm_hook(self, model: Any) -> None:
        """Let the copies of a model exchange gradients in 16 bits or as low-rank factors (PowerSGD), as the two options say."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[str, Any] = {
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
            "power_sgd": powerSGD_hook.powerSGD_hook,
            "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
        }
        wrappers: dict[str, Any] = {
            "fp16": default_hooks.fp16_compress_wrapper,
            "bf16": default_hooks.bf16_compress_wrapper,
        }
        hook_name, wrapper = named(self.comm_hook), named(self.comm_wrapper)
        for name, requested, known in (("comm_hook", hook_name, hooks), ("comm_wrapper", wrapper, wrappers)):
            if requested != "no" and requested not in known:
                raise ConfigurationError(
                    f"{name}={requested!r} is not known. Choose one of 'no', {', '.join(map(repr, known))}."
                )
        if hook_name != "no":
            hook = hooks[hook_name] if wrapper == "no" else wrappers[wrapper](hooks[hook_name])
            is_low_rank = hook_name.endswith("sgd")
            state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option) if is_low_rank else None
            model.register_comm_hook(state=state, hook=hook)


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """
    The accumulation of gradients: `num_steps` micro-steps to a step, and what ends such a window early.

    A window that the end of a loader cuts short is divided by `num_steps` all the same, which is Accelerate's rule and the
    default here, so that a changed import line changes no number: with 6 batches and `num_steps=4` the second step sees
    half of the mean gradient. With `average_over_window=True` it is divided by the micro-steps that it has.

    >>> Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(4, average_over_window=True))  # doctest: +SKIP
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    average_over_window: bool = False


@dataclass
class DataLoaderConfiguration:
    """
    The distribution of loaders among processes.

    `progress` shows each epoch as a bar of its rank in the notebook, without writing anything; `None` leaves it to the
    launcher's `loader_progress`.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    progress: bool | None = None


@dataclass
class ProjectConfiguration:
    """The folders of a project's files, and the names and number of its checkpoints."""

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Keep the project in `project_dir`, and its logs too where no other folder was named for them."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
