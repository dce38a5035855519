"""Device support of torch on this machine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.enums import DistributedType
from accelerate_nb.runtime.compat.env_vars import parse_flag_from_env, patch_environment
from accelerate_nb.runtime.compat.packages import is_installed, is_transformer_engine_available
from accelerate_nb.runtime.compat.versions import is_torch_version
from accelerate_nb.runtime.xla import device as xla


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether Transformer Engine is installed, and this GPU has its block-scaled fp8 (compute capability 10)."""
    return is_transformer_engine_available() and is_cuda_available() and torch.cuda.get_device_capability() >= (10, 0)


def is_fp16_available() -> bool:
    """Whether this process's device computes in fp16."""
    return not is_habana_gaudi1()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether this process's device computes in bf16; with `ignore_tpu` a TPU counts as one that doesn't."""
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    if is_cuda_available():
        return bool(torch.cuda.is_bf16_supported())
    if is_xpu_available():
        return bool(torch.xpu.is_bf16_supported())
    return torch.backends.mps.is_macos_or_newer(14, 0) if is_mps_available() else True


def is_cuda_available() -> bool:
    """Whether torch can use an NVIDIA or AMD GPU; found so that no driver is woken, and a later fork stays possible."""
    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Whether torch is built for AMD's GPUs, and can use one."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether torch can use Apple's GPU, and is of this version or newer."""
    return is_torch_version(">=", min_version) and torch.backends.mps.is_available()


def _support(device: str, description: str) -> Callable[..., bool]:
    """One of Accelerate's functions that tell whether torch can use a type of device."""

    def is_available(check_device: bool = False) -> bool:  # noqa: ARG001 - torch decides in any case
        return _can_use(device)

    is_available.__doc__ = f"Whether torch can use {description}."
    return is_available


is_xpu_available = _support("xpu", "Intel's GPU")
is_npu_available = _support("npu", "Huawei's NPU")
is_mlu_available = _support("mlu", "Cambricon's MLU")
is_musa_available = _support("musa", "Moore Threads' GPU")
is_sdaa_available = _support("sdaa", "Tecorigin's SDAA")
is_neuron_available = _support("neuron", "Amazon's Neuron")


def is_hpu_available(init_hccl: bool = False) -> bool:  # noqa: ARG001 - torch does so by itself
    """Whether torch can use Intel's Gaudi."""
    return _can_use("hpu")


def is_habana_gaudi1() -> bool:
    """Whether this process's device is a Gaudi of the first generation, which has no fp16; no newer torch runs on it."""
    return False


def get_current_device_type() -> tuple[str, str]:
    """Torch's name for the accelerators of this machine, and the name of a run on several of them; no device is woken."""
    others = {
        "mlu": is_mlu_available,
        "sdaa": is_sdaa_available,
        "musa": is_musa_available,
        "npu": is_npu_available,
        "hpu": is_hpu_available,
        "xpu": is_xpu_available,
        "neuron": is_neuron_available,
    }
    found = next((device for device, is_available in others.items() if is_available()), "cuda")
    return found, DistributedType.of(2, found).value


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed, and `USE_TORCH_XLA` isn't false; on request, whether it has a TPU, or a GPU."""
    if check_is_tpu and check_is_gpu:
        raise ConfigurationError("check_is_tpu and check_is_gpu were both passed. Pass one of them.")
    if not (parse_flag_from_env("USE_TORCH_XLA", True) and is_installed("torch_xla")):
        return False
    if check_is_tpu:
        return xla.device_type() == "TPU"
    return xla.device_type() in {"GPU", "CUDA"} if check_is_gpu else True


def is_torch_distributed_available() -> bool:
    """Whether torch was built with its distributed part."""
    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """Whether torch was built with what connects Intel's GPUs."""
    return torch.distributed.is_available() and torch.distributed.is_xccl_available()


def is_pippy_available() -> bool:
    """Whether torch has its pipelining part."""
    return is_torch_version(">=", "2.4.0")


def is_weights_only_available() -> bool:
    """Whether torch takes a list of classes that are safe to load."""
    return is_torch_version(">=", "2.4.0")


def _can_use(device: str) -> bool:
    # a package for a device of another vendor enters itself into torch when torch is imported
    module = getattr(torch, device, None)
    return module is not None and bool(module.is_available())
