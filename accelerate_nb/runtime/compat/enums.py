"""The closed sets of names that the runtime's settings choose from, as Hugging Face Accelerate spells them."""

from __future__ import annotations

import enum
from typing import Any

# What `accelerate.utils.dataclasses` offers.
__all__ = [
    "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType", "DistributedType", "DynamoBackend",
    "FP8BackendType", "LoggerType", "PrecisionType", "RNGType",
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
