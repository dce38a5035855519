"""The optional packages that are installed, and their versions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, TypeVar, cast

from packaging.version import Version, parse

from accelerate_nb.errors import MissingExtraError
from accelerate_nb.runtime.compat.env_vars import parse_flag_from_env

F = TypeVar("F", bound=Callable[..., Any])


# An error is not kept: what a notebook installs a moment later is found, and what was found is not searched again.
@functools.cache
def _found(module: str, distribution: str) -> Version:
    """The version in which a module is installed; `PackageNotFoundError` for a mere folder of the same name."""
    if find_spec(module) is None:
        raise PackageNotFoundError(module)
    return parse(version(distribution))


def is_installed(module: str, *distributions: str, at_least: str | None = None, below: str | None = None) -> bool:
    """
    Whether a module comes with an installed package, in a version of these bounds.

    `distributions` are the names under which the package may be installed, where they aren't the module's own.

    >>> is_installed("torch", at_least="2.0")
    True
    """
    for distribution in distributions or (module,):
        try:
            found = _found(module, distribution)
        except PackageNotFoundError:
            continue
        return (at_least is None or found >= parse(at_least)) and (below is None or found < parse(below))
    return False


def is_import_timer_available() -> bool:
    """Whether import_timer is installed."""
    return is_installed("import_timer")


def is_pynvml_available() -> bool:
    """Whether NVIDIA's management library for Python is installed."""
    return is_installed("pynvml", "pynvml", "nvidia-ml-py")


def is_amdsmi_available() -> bool:
    """Whether AMD's management library for Python is installed."""
    return is_installed("amdsmi")


def is_pytest_available() -> bool:
    """Whether pytest is installed."""
    return is_installed("pytest")


def is_schedulefree_available() -> bool:
    """Whether schedulefree's optimizers are installed."""
    return is_installed("schedulefree")


def is_lomo_available() -> bool:
    """Whether LOMO's optimizers are installed."""
    return is_installed("lomo_optim")


def is_msamp_available() -> bool:
    """Whether MS-AMP is installed."""
    return is_installed("msamp", "ms-amp")


def is_transformer_engine_available() -> bool:
    """Whether NVIDIA's Transformer Engine is installed."""
    return is_installed("transformer_engine", "transformer-engine")


def is_torchao_available() -> bool:
    """Whether torchao, in a version that trains in fp8, is installed."""
    return is_installed("torchao", at_least="0.6.1")


def is_deepspeed_available() -> bool:
    """Whether DeepSpeed is installed."""
    return is_installed("deepspeed")


def is_4bit_bnb_available() -> bool:
    """Whether bitsandbytes, in a version that knows 4 bits, is installed."""
    return is_installed("bitsandbytes", at_least="0.39.0")


def is_8bit_bnb_available() -> bool:
    """Whether bitsandbytes, in a version that knows 8 bits, is installed."""
    return is_installed("bitsandbytes", at_least="0.37.2")


def is_torchvision_available() -> bool:
    """Whether torchvision is installed."""
    return is_installed("torchvision")


def is_transformers_available() -> bool:
    """Whether transformers is installed."""
    return is_installed("transformers")


def is_datasets_available() -> bool:
    """Whether datasets is installed."""
    return is_installed("datasets")


def is_peft_available() -> bool:
    """Whether PEFT is installed."""
    return is_installed("peft")


def is_timm_available() -> bool:
    """Whether timm is installed."""
    return is_installed("timm")


def is_triton_available() -> bool:
    """Whether Triton is installed."""
    return is_installed("triton", "triton", "triton-xpu")


def is_aim_available() -> bool:
    """Whether Aim, in a version that tracks runs, is installed."""
    return is_installed("aim", below="4.0.0")


def is_wandb_available() -> bool:
    """Whether Weights & Biases is installed."""
    return is_installed("wandb")


def is_comet_ml_available() -> bool:
    """Whether Comet is installed."""
    return is_installed("comet_ml")


def is_swanlab_available() -> bool:
    """Whether SwanLab is installed."""
    return is_installed("swanlab")


def is_trackio_available() -> bool:
    """Whether Trackio is installed."""
    return is_installed("trackio")


def is_boto3_available() -> bool:
    """Whether Amazon's boto3 is installed."""
    return is_installed("boto3")


def is_sagemaker_available() -> bool:
    """Whether Amazon's SageMaker is installed."""
    return is_installed("sagemaker")


def is_tqdm_available() -> bool:
    """Whether tqdm is installed."""
    return is_installed("tqdm")


def is_clearml_available() -> bool:
    """Whether ClearML is installed."""
    return is_installed("clearml")


def is_pandas_available() -> bool:
    """Whether pandas is installed."""
    return is_installed("pandas")


def is_matplotlib_available() -> bool:
    """Whether matplotlib is installed."""
    return is_installed("matplotlib")


def is_mlflow_available() -> bool:
    """Whether MLflow is installed."""
    return is_installed("mlflow", "mlflow", "mlflow-skinny")


def is_dvclive_available() -> bool:
    """Whether DVCLive is installed."""
    return is_installed("dvclive")


def is_torchdata_available() -> bool:
    """Whether torchdata is installed."""
    return is_installed("torchdata")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Whether torchdata, in a version that has stateful loaders, is installed."""
    return is_installed("torchdata", at_least="0.8.0")


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
    """Whether Megatron-LM's training part is installed, and enabled by `ACCELERATE_USE_MEGATRON_LM`."""
    if not parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"):
        return False
    return is_installed("megatron", "megatron-core", at_least="0.8.0") and find_spec("megatron.training") is not None


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
