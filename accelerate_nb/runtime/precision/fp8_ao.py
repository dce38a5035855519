"""Linear layers that multiply in 8-bit floats, by torchao."""

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch.nn import Linear, Module

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.enums import FP8BackendType
from accelerate_nb.runtime.compat.env_vars import is_yes
from accelerate_nb.runtime.compat.kwargs_handlers import AutocastKwargs, KwargsHandler
from accelerate_nb.runtime.compat.packages import torchao_required
from accelerate_nb.runtime.precision.base import BF16, Precision

# What `accelerate.utils.ao` offers.
__all__ = [
    "convert_model_to_fp8_ao", "filter_first_and_last_linear_layers", "filter_linear_layers",
    "find_first_last_linear_layers", "has_ao_layers",
]  # fmt: skip


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
