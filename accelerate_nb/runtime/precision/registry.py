"""Which precision a name means on a device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from accelerate_nb.errors import ConfigurationError, MissingExtraError
from accelerate_nb.runtime.handlers import AutocastKwargs, GradScalerKwargs, KwargsHandler
from accelerate_nb.runtime.installed import is_msamp_available, is_torchao_available, is_transformer_engine_available
from accelerate_nb.runtime.kinds import FP8BackendType
from accelerate_nb.runtime.precision.amp import BF16, FP16
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.precision.fp8_ao import AORecipeKwargs
from accelerate_nb.runtime.precision.fp8_msamp import MSAMPRecipeKwargs
from accelerate_nb.runtime.precision.fp8_te import TERecipeKwargs

Recipe = AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs


def choose_precision(
    name: str,
    device: torch.device,
    autocast: AutocastKwargs | None = None,
    scaling: GradScalerKwargs | None = None,
    recipe: Recipe | None = None,
) -> Precision:
    """The precision of a name that `precision_name` returned; `recipe` is what `choose_recipe` returned."""
    if device.type == "xla" and name in {"fp16", "fp8"}:
        raise ConfigurationError(
            f"mixed_precision={name!r} was asked for, but torch_xla's devices compute in float32 and bfloat16: nothing there "
            "scales losses or counts in 8 bits. Use mixed_precision='bf16'."
        )
    if recipe is not None:
        return recipe.precision_on(device, autocast)
    if name == "bf16":
        return BF16(device, autocast)
    if name == "fp16":
        return FP16(device, autocast, scaling)
    return Precision()


def choose_recipe(name: str, handlers: Iterable[KwargsHandler], asked: str) -> Recipe | None:
    """
    How to compute in 8-bit floats: as a handler says, else with the package `asked` for, else with one that is installed.

    `None` for other precisions; `MissingExtraError` where no such package is installed.
    """
    given = [each for each in handlers if isinstance(each, (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs))]
    names = " and ".join(type(each).__name__ for each in given)
    if given and name != "fp8":
        raise ConfigurationError(
            f"Passing in an FP8 configuration requires setting `mixed_precision='fp8'`: it is {name!r}, and "
            f"kwargs_handlers has {names}. Say 'fp8', or leave the handler out."
        )
    if len(given) > 1:
        raise ConfigurationError(f"kwargs_handlers has several ways to compute in fp8: {names}. Pass one of them.")
    if given or name != "fp8":
        return given[0] if given else None
    return _recipe_of(package_named(asked))()


def package_named(asked: str) -> FP8BackendType:
    """The package that `ACCELERATE_FP8_BACKEND` names; "NO" leaves the choice open."""
    try:
        return FP8BackendType(asked.upper())
    except ValueError:
        known = ", ".join(repr(each.value) for each in FP8BackendType)
        raise ConfigurationError(
            f"ACCELERATE_FP8_BACKEND is {asked!r}, which is not known. Set it to one of {known}."
        ) from None


def _recipe_of(asked: FP8BackendType) -> type[Recipe]:
    packages: tuple[tuple[FP8BackendType, type[Recipe], bool], ...] = (
        (FP8BackendType.AO, AORecipeKwargs, is_torchao_available()),
        (FP8BackendType.TE, TERecipeKwargs, is_transformer_engine_available()),
        (FP8BackendType.MSAMP, MSAMPRecipeKwargs, is_msamp_available()),
    )
    for package, recipe, is_there in packages:
        if package == asked or (is_there and asked == FP8BackendType.NO):
            return recipe
    raise MissingExtraError(
        "mixed_precision='fp8' needs a package that computes in 8-bit floats, and none is installed: pip install torchao"
    )
