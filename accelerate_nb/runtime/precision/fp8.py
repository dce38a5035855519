"""Linear layers that multiply in 8-bit floats: by torchao, and the settings of Transformer Engine and MS-AMP."""

import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import torch
from torch.nn import Linear, Module

from accelerate_nb.config.environment import fp8_backend
from accelerate_nb.errors import ConfigurationError, MissingExtraError, NotYetError
from accelerate_nb.runtime.compat.dataclasses import AutocastKwargs, FP8BackendType, KwargsHandler
from accelerate_nb.runtime.compat.env_vars import is_yes
from accelerate_nb.runtime.compat.packages import is_msamp_available, is_transformer_engine_available, torchao_required
from accelerate_nb.runtime.precision.base import BF16, Precision
from accelerate_nb.user_warnings import warn_user

# What `accelerate.utils.ao` offers.
__all__ = [
    "convert_model_to_fp8_ao", "filter_first_and_last_linear_layers", "filter_linear_layers",
    "find_first_last_linear_layers", "has_ao_layers",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])

_PREFIX = "ACCELERATE_FP8_"


@dataclass
class TERecipeKwargs(KwargsHandler):
    """
    Transformer Engine's scaling of 8-bit floats; the names are those of its `DelayedScaling` recipe.

    Fields left out come from variables `ACCELERATE_FP8_*` (`MARGIN`, `INTERVAL`, `FORMAT`, `AMAX_HISTORY_LEN`, ...).
    `MissingExtraError` without Transformer Engine.
    """

    package: ClassVar[FP8BackendType] = FP8BackendType.TE

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def _fill(self, environment: Mapping[str, str]) -> None:
        _require("TERecipeKwargs")
        for name, default in (("margin", 0), ("interval", 1), ("amax_history_len", 1024)):
            if getattr(self, name) is None:
                setattr(self, name, int(environment.get(f"{_PREFIX}{name.upper()}", default)))
        for name in ("use_autocast_during_eval", "use_mxfp8_block_scaling"):
            if getattr(self, name) is None:
                setattr(self, name, is_yes(environment, f"{_PREFIX}{name.upper()}"))
        if self.override_linear_precision is None:
            fprop, dgrad, wgrad = (
                is_yes(environment, f"{_PREFIX}OVERRIDE_{name}") for name in ("FPROP", "DGRAD", "WGRAD")
            )
            self.override_linear_precision = fprop, dgrad, wgrad
        value = environment.get(f"{_PREFIX}FORMAT", "HYBRID") if self.fp8_format is None else self.fp8_format
        self.fp8_format = checked_choice("fp8_format", value.upper(), ("HYBRID", "E4M3", "E5M2"))
        value = self.amax_compute_algo or environment.get(f"{_PREFIX}AMAX_COMPUTE_ALGO", "most_recent")
        self.amax_compute_algo = checked_choice("amax_compute_algo", value.lower(), ("max", "most_recent"))

    def precision_on(self, device: torch.device, autocast: AutocastKwargs | None) -> Precision:
        """The precision of this recipe on a device; `NotYetError`."""
        _refuse("mixed_precision='fp8' by Transformer Engine")


def checked_choice(name: str, value: str, known: tuple[str, ...]) -> str:
    """The value, if it is a known one."""
    if value not in known:
        raise ConfigurationError(f"`{name}` must be one of {' or '.join(known)}, but is {value!r}. Choose one of them.")
    return value


def _require(feature: str) -> None:
    if not is_transformer_engine_available():
        raise MissingExtraError(
            f"{feature} needs Transformer Engine, which is not installed: pip install 'transformer_engine[pytorch]'. "
            "AORecipeKwargs computes in fp8 by torchao."
        )


def _refuse(feature: str) -> NoReturn:
    _require(feature)
    raise NotYetError(f"{feature} is not offered here yet. Use AORecipeKwargs, which computes in fp8 by torchao.")


def _unsupported(function: F) -> F:
    @functools.wraps(function)
    def refusing(*_: Any, **__: Any) -> NoReturn:
        _refuse(function.__name__)

    return cast("F", refusing)


@_unsupported
def convert_model(
    model: Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace the model's layers by Transformer Engine's; `NotYetError`, or `MissingExtraError` without the package."""


def has_transformer_engine_layers(model: Module) -> bool:
    """Whether the model has layers of Transformer Engine; `MissingExtraError` without the package."""
    _require("has_transformer_engine_layers")
    return any(type(module).__module__.startswith("transformer_engine.") for module in model.modules())


@_unsupported
def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """A forward in Transformer Engine's autocast; `NotYetError`, or `MissingExtraError` without the package."""
    raise NotImplementedError


@_unsupported
def apply_fp8_autowrap(model: Module, fp8_recipe_handler: TERecipeKwargs | None) -> Module:
    """The model in Transformer Engine's autocast; `NotYetError`, or `MissingExtraError` without the package."""
    raise NotImplementedError


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """MS-AMP's level of 8-bit floats: "O1" weights' gradients, "O2" optimizer states, too."""

    package: ClassVar[FP8BackendType] = FP8BackendType.MSAMP

    opt_level: str | None = None

    def _fill(self, environment: Mapping[str, str]) -> None:
        value = environment.get("ACCELERATE_FP8_OPT_LEVEL", "O2") if self.opt_level is None else self.opt_level
        self.opt_level = checked_choice("opt_level", value, ("O1", "O2"))

    def precision_on(self, device: torch.device, autocast: AutocastKwargs | None) -> Precision:
        """The precision of this recipe on a device; `NotYetError`, or `MissingExtraError` without the package."""
        if not is_msamp_available():
            raise MissingExtraError(
                "mixed_precision='fp8' by MS-AMP needs MS-AMP, which is not installed. "
                "Use AORecipeKwargs, which computes in fp8 by torchao."
            )
        raise NotYetError(
            "mixed_precision='fp8' by MS-AMP is not offered here yet. Use AORecipeKwargs, which computes in fp8 by torchao."
        )


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The settings of Transformer Engine and of MS-AMP in one, for `backend` "TE" or "MSAMP"; deprecated, use theirs."""

    backend: str | None = None

    def _fill(self, environment: Mapping[str, str]) -> None:
        warn_user(
            "FP8RecipeKwargs is deprecated. Use TERecipeKwargs, MSAMPRecipeKwargs or AORecipeKwargs.", FutureWarning
        )
        named, default = fp8_backend(environment), "MSAMP" if is_msamp_available() else "TE"
        value = self.backend or (default if named == "NO" else named)
        self.backend = checked_choice("backend", value.upper(), ("MSAMP", "TE"))
        TERecipeKwargs._fill(self, environment)
        MSAMPRecipeKwargs._fill(self, environment)

    @property
    def package(self) -> FP8BackendType:  # type: ignore[override]  # known once it is made: one of two
        """The package that computes."""
        return FP8BackendType(self.backend)

    def precision_on(self, device: torch.device, autocast: AutocastKwargs | None) -> Precision:
        """The precision of this recipe on a device; `NotYetError`."""
        recipe = MSAMPRecipeKwargs if self.package == FP8BackendType.MSAMP else TERecipeKwargs
        return recipe.precision_on(self, device, autocast)


@dataclass
class AORecipeKwargs(KwargsHandler):
    """
    The conversion of linear layers by torchao: a `torchao.float8.Float8LinearConfig`, and which layers.

    Without a `config` one is made that pads inner dimensions to multiples of 16, unless `pad_inner_dim` or the variable
    `ACCELERATE_FP8_PAD_INNER_DIM` is false. `enable_fsdp_float8_all_gather` counts where weights are sharded.
    `MissingExtraError` without torchao.
    """

    package: ClassVar[FP8BackendType] = FP8BackendType.AO

    config: Any = None
    module_filter_func: Callable[[Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def _fill(self, environment: Mapping[str, str]) -> None:
        float8 = _float8()
        if self.config is not None:
            return
        prefix = "ACCELERATE_FP8_"
        if self.pad_inner_dim is None:
            self.pad_inner_dim = is_yes(environment, f"{prefix}PAD_INNER_DIM", "yes")
        if self.enable_fsdp_float8_all_gather is None:
            self.enable_fsdp_float8_all_gather = is_yes(environment, f"{prefix}ENABLE_FSDP_FLOAT8_ALL_GATHER", "yes")
        self.config = float8.Float8LinearConfig(
            pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather
        )

    def precision_on(self, device: torch.device, autocast: AutocastKwargs | None) -> Precision:
        """The precision of this recipe on a device."""
        return FP8AO(device, autocast, self)


class FP8AO(BF16):
    """Inner linear layers multiply in 8-bit floats, the other operations compute in bfloat16."""

    name = "fp8"

    def __init__(self, device: torch.device, options: AutocastKwargs | None, recipe: AORecipeKwargs) -> None:
        self.recipe = recipe
        super().__init__(device, options)

    def _check(self) -> None:
        if self.device.type != "cuda" or self.recipe.config.emulate or torch.version.hip:
            return
        found = torch.cuda.get_device_capability(self.device)
        if found < (8, 9):
            raise ConfigurationError(
                f"mixed_precision='fp8' was requested, but {torch.cuda.get_device_name(self.device)} has compute capability "
                f"{found[0]}.{found[1]} and can't multiply 8-bit floats, which takes 8.9 (Ada, Hopper or newer). "
                "Use mixed_precision='bf16' there."
            )

    def wrap_forward(self, model: Module) -> Module:
        """The model with converted layers, whose weights stay the parameters that an optimizer may hold already."""
        if not has_ao_layers(model):
            # only sharded weights are gathered; torchao would replace the parameters of those that are not
            config = replace(self.recipe.config, enable_fsdp_float8_all_gather=False)
            convert_model_to_fp8_ao(model, config, self.recipe.module_filter_func)
        return super().wrap_forward(model)


@torchao_required
def convert_model_to_fp8_ao(
    model: Module, config: Any = None, module_filter_func: Callable[[Module, str], bool] | None = None
) -> None:
    """
    Replace the model's linear layers by torchao's `Float8Linear`, which keep their weights.

    All layers with sizes that are multiples of 16, but the first and the last: they decide whether training is stable. A
    `module_filter_func(module, name)` chooses others. `MissingExtraError` without torchao.
    """
    chosen = module_filter_func or partial(filter_linear_layers, layers_to_filter=find_first_last_linear_layers(model))
    _float8().convert_to_float8_training(model, module_filter_fn=chosen, config=config)


@torchao_required
def has_ao_layers(model: Module) -> bool:
    """Whether torchao converted some layer of the model; `MissingExtraError` without torchao."""
    converted = importlib.import_module("torchao.float8.float8_linear").Float8Linear
    return any(isinstance(module, converted) for module in model.modules())


def find_first_last_linear_layers(model: Module) -> tuple[str | None, str | None]:
    """The names of the model's first and last linear layers; `None` where it has none."""
    names = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: Module, fqn: str, layers_to_filter: Collection[str | None]) -> bool:
    """Whether a layer of this name can be converted: its sizes are multiples of 16, and it is not among `layers_to_filter`."""
    if isinstance(module, Linear) and (module.in_features % 16 or module.out_features % 16):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: Module, fqn: str) -> bool:
    """
    Whether the part `fqn` of the model `module` can be converted: it is neither its first linear layer nor its last.

    As a `module_filter_func` it is called for one layer after the other and sees no model, as in Accelerate; leave that out to
    spare the first and the last layer.
    """
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


@torchao_required
def _float8() -> Any:
    return importlib.import_module("torchao.float8")
