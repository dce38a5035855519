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
    """Whether megatron-core is installed, and enabled by `ACCELERATE_USE_MEGATRON_LM`."""
    return parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM") and is_installed(
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
