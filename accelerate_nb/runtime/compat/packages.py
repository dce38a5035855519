"""The optional packages that are installed, their versions, and the devices that torch can use."""

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version as installed_version
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
from packaging.version import Version, parse

from accelerate_nb.config.options import megatron
from accelerate_nb.errors import ConfigurationError, MissingExtraError
from accelerate_nb.runtime.compat.constants import STR_OPERATION_TO_FUNC
from accelerate_nb.runtime.compat.dataclasses import DistributedType
from accelerate_nb.runtime.compat.env_vars import parse_flag_from_env, patch_environment
from accelerate_nb.runtime.xla import device as xla

# What `accelerate.utils.imports` offers.
__all__ = [
    "is_4bit_bnb_available", "is_8bit_bnb_available", "is_aim_available", "is_amdsmi_available", "is_bf16_available",
    "is_bitsandbytes_multi_backend_available", "is_bnb_available", "is_boto3_available", "is_clearml_available",
    "is_comet_ml_available", "is_cuda_available", "is_datasets_available", "is_deepspeed_available",
    "is_dvclive_available", "is_fp16_available", "is_fp8_available", "is_habana_gaudi1", "is_hpu_available",
    "is_import_timer_available", "is_lomo_available", "is_matplotlib_available", "is_megatron_lm_available",
    "is_mlflow_available", "is_mlu_available", "is_mps_available", "is_msamp_available", "is_musa_available",
    "is_neuron_available", "is_npu_available", "is_numpy_available", "is_pandas_available", "is_peft_available",
    "is_pippy_available", "is_pynvml_available", "is_pytest_available", "is_rich_available", "is_rocm_available",
    "is_sagemaker_available", "is_schedulefree_available", "is_sdaa_available", "is_swanlab_available",
    "is_tensorboard_available", "is_timm_available", "is_torch_distributed_available", "is_torch_xla_available",
    "is_torchao_available", "is_torchdata_available", "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available", "is_tqdm_available", "is_trackio_available", "is_transformer_engine_available",
    "is_transformer_engine_mxfp8_available", "is_transformers_available", "is_triton_available", "is_wandb_available",
    "is_weights_only_available", "is_xccl_available", "is_xpu_available", "torchao_required",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])


# An error is not kept: what a notebook installs a moment later is found, and what was found is not searched again.
@functools.cache
def _found(module: str, distribution: str) -> Version:
    """The version in which a module is installed; `PackageNotFoundError` for a mere folder of the same name."""
    if find_spec(module) is None:
        raise PackageNotFoundError(module)
    return parse(installed_version(distribution))


def is_installed(module: str, *distributions: str, at_least: str | None = None, below: str | None = None) -> bool:
    """Whether a module comes with an installed package, in a version of these bounds; `distributions` are the package's other names."""
    for distribution in distributions or (module,):
        try:
            found = _found(module, distribution)
        except PackageNotFoundError:
            continue
        return (at_least is None or found >= parse(at_least)) and (below is None or found < parse(below))
    return False


def _availability(
    module: str, *distributions: str, at_least: str | None = None, below: str | None = None
) -> Callable[[], bool]:
    """One of Accelerate's functions that tell whether a package is installed."""

    def is_available() -> bool:
        return is_installed(module, *distributions, at_least=at_least, below=below)

    is_available.__doc__ = f"Whether `{module}` is installed, in a version that Accelerate can use."
    return is_available


is_import_timer_available = _availability("import_timer")
is_pynvml_available = _availability("pynvml", "pynvml", "nvidia-ml-py")
is_amdsmi_available = _availability("amdsmi")
is_pytest_available = _availability("pytest")
is_schedulefree_available = _availability("schedulefree")
is_lomo_available = _availability("lomo_optim")
is_msamp_available = _availability("msamp", "ms-amp")
is_transformer_engine_available = _availability("transformer_engine", "transformer-engine")
is_torchao_available = _availability("torchao", at_least="0.6.1")
is_deepspeed_available = _availability("deepspeed")
is_4bit_bnb_available = _availability("bitsandbytes", at_least="0.39.0")
is_8bit_bnb_available = _availability("bitsandbytes", at_least="0.37.2")
is_torchvision_available = _availability("torchvision")
is_transformers_available = _availability("transformers")
is_datasets_available = _availability("datasets")
is_peft_available = _availability("peft")
is_timm_available = _availability("timm")
is_triton_available = _availability("triton", "triton", "triton-xpu")
is_aim_available = _availability("aim", below="4.0.0")
is_wandb_available = _availability("wandb")
is_comet_ml_available = _availability("comet_ml")
is_swanlab_available = _availability("swanlab")
is_trackio_available = _availability("trackio")
is_boto3_available = _availability("boto3")
is_sagemaker_available = _availability("sagemaker")
is_tqdm_available = _availability("tqdm")
is_clearml_available = _availability("clearml")
is_pandas_available = _availability("pandas")
is_matplotlib_available = _availability("matplotlib")
is_mlflow_available = _availability("mlflow", "mlflow", "mlflow-skinny")
is_dvclive_available = _availability("dvclive")
is_torchdata_available = _availability("torchdata")
is_torchdata_stateful_dataloader_available = _availability("torchdata", at_least="0.8.0")


def is_tensorboard_available() -> bool:
    """Whether TensorBoard, or tensorboardX, is installed."""
    return is_installed("tensorboard") or is_installed("tensorboardX")


def is_rich_available() -> bool:
    """Whether rich is installed, and enabled by `ACCELERATE_ENABLE_RICH`."""
    return is_installed("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, in this version or a newer one."""
    return is_installed("bitsandbytes", at_least=min_version)


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether the installed bitsandbytes works on other devices than NVIDIA's."""
    # the package lists it among its features since 0.43, and every build has it since 0.45
    return is_installed("bitsandbytes") and "multi_backend" in getattr(import_module("bitsandbytes"), "features", ())


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is installed in this version or a newer one."""
    return is_installed("numpy", at_least=min_version)


def is_megatron_lm_available() -> bool:
    """Whether megatron-core is installed, and enabled by the variable of its strategy."""
    return parse_flag_from_env(megatron.STRATEGY.variable) and is_installed(
        "megatron", "megatron-core", at_least="0.8.0"
    )


def is_fp8_available() -> bool:
    """Whether some package that trains in fp8 is installed."""
    return is_transformer_engine_available() or is_torchao_available() or is_msamp_available()


def torchao_required(func: F) -> F:
    """A decorator: the function raises `MissingExtraError`, an `ImportError`, where torchao isn't installed."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not is_torchao_available():
            raise MissingExtraError(f"{func.__name__} needs torchao, which is not installed: pip install torchao")
        return func(*args, **kwargs)

    return cast("F", checked)


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """
    Whether a version, or the installed version of a named package, relates to another by ">", ">=", "==", "!=", "<=" or "<".

    >>> compare_versions("torch", ">=", "2.9")
    True
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ConfigurationError(
            f"Versions were to be compared by {operation!r}. `operation` must be one of {list(STR_OPERATION_TO_FUNC)}."
        )
    if isinstance(library_or_version, str):
        library_or_version = parse(installed_version(library_or_version))
    return STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether the installed torch's version relates to `version` by `operation`."""
    return compare_versions(_found("torch", "torch"), operation, version)


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
    others = ("mlu", "sdaa", "musa", "npu", "hpu", "xpu", "neuron")
    found = next((device for device in others if _can_use(device)), "cuda")
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
