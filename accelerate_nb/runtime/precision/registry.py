"""The precision that a name means on a device, and Hugging Face's functions for it."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from accelerate_nb.config.environment import FP8_BACKEND
from accelerate_nb.errors import ConfigurationError, MissingExtraError
from accelerate_nb.runtime.compat.dataclasses import (
    AutocastKwargs,
    DistributedType,
    FP8BackendType,
    GradScalerKwargs,
    KwargsHandler,
)
from accelerate_nb.runtime.compat.packages import (
    is_msamp_available,
    is_torchao_available,
    is_transformer_engine_available,
)
from accelerate_nb.runtime.precision.base import BF16, FP16, Precision
from accelerate_nb.runtime.precision.fp8 import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accelerate_nb.runtime.world.state import AcceleratorState

Recipe = AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs


@dataclass(frozen=True, slots=True)
class PrecisionOptions:
    """The options of a precision, of which each is for some; `recipe` is what `choose_recipe` returned."""

    autocast: AutocastKwargs | None = None
    scaling: GradScalerKwargs | None = None
    recipe: Recipe | None = None


def choose_precision(name: str, device: torch.device, options: PrecisionOptions) -> Precision:
    """The precision of a name that `precision_name` returned, on a device that can compute in it."""
    if options.recipe is not None:
        return options.recipe.precision_on(device, options.autocast)
    if name == "bf16":
        return BF16(device, options.autocast)
    if name == "fp16":
        return FP16(device, options.autocast, options.scaling)
    return Precision()


def choose_recipe(name: str, handlers: Iterable[KwargsHandler], requested: str) -> Recipe | None:
    """The recipe for fp8: a handler's, else the `requested` package's, else that of one that is installed; `None` for other precisions."""
    given = [handler for handler in handlers if isinstance(handler, Recipe)]
    names = " and ".join(type(item).__name__ for item in given)
    if given and name != "fp8":
        raise ConfigurationError(
            f"Passing in an FP8 configuration requires setting `mixed_precision='fp8'`: it is {name!r}, and "
            f"kwargs_handlers has {names}. Pass 'fp8', or leave the handler out."
        )
    if len(given) > 1:
        raise ConfigurationError(f"kwargs_handlers has several ways to compute in fp8: {names}. Pass one of them.")
    if given or name != "fp8":
        return given[0] if given else None
    wanted = package_named(requested)
    packages: tuple[tuple[type[Recipe], bool], ...] = (
        (AORecipeKwargs, is_torchao_available()),
        (TERecipeKwargs, is_transformer_engine_available()),
        (MSAMPRecipeKwargs, is_msamp_available()),
    )
    for recipe, is_there in packages:
        if recipe.package == wanted or (is_there and wanted == FP8BackendType.NO):
            return recipe()
    raise MissingExtraError(
        "mixed_precision='fp8' needs a package that computes in 8-bit floats, and none is installed: pip install torchao"
    )


def package_named(requested: str) -> FP8BackendType:
    """The package that the variable for it names; "NO" leaves the choice open."""
    try:
        return FP8BackendType(requested.upper())
    except ValueError:
        known = ", ".join(repr(item.value) for item in FP8BackendType)
        raise ConfigurationError(
            f"{FP8_BACKEND} is {requested!r}, which is not known. Set it to one of {known}."
        ) from None


_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """A block in which operations choose the precision of the process's `Accelerator`; one that does nothing unless `native_amp`."""
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    options = autocast_kwargs or AutocastKwargs()
    return torch.autocast(
        state.device.type,
        dtype=_TYPES.get(str(state.mixed_precision)),
        enabled=options.enabled,
        cache_enabled=options.cache_enabled,
    )


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """A scaler of losses for the accelerator of this machine, CUDA's where there is none; FSDP's own for sharded weights."""
    if distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(**kwargs)
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.amp.GradScaler("cuda" if found is None else found.type, **kwargs)
