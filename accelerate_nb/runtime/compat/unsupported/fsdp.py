"""Names of Accelerate's functions for FSDP that are not offered yet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module

from accelerate_nb.runtime.compat.unsupported.base import Unsupported

_unsupported = Unsupported("FSDP", "Train with DDP: leave it out.")


@_unsupported
def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = False,
) -> Any: ...


@_unsupported
def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = False,
) -> Any: ...


@_unsupported
def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = False,
) -> Any: ...


@_unsupported
def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = False,
) -> Any: ...


@_unsupported
def ensure_weights_retied(param_init_fn: Callable[[Module], None], model: Module, device: Any) -> Any: ...


@_unsupported
def get_parameters_from_modules(modules: Iterable[Module] | str | None, model: Module, device: Any) -> Any: ...


@_unsupported
def fsdp2_load_full_state_dict(
    accelerator: Any, model: Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> Any: ...


@_unsupported
def fsdp2_switch_optimizer_parameters(optimizer: Any, mapping: dict[str, Any]) -> Any: ...


@_unsupported
def fsdp2_prepare_model(accelerator: Any, model: Module) -> Any: ...


@_unsupported
def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: Module) -> Any: ...


@_unsupported
def fsdp2_apply_ac(accelerator: Any, model: Module) -> Any: ...


@_unsupported
def fsdp2_canonicalize_names(named_params: dict[str, Tensor]) -> Any: ...


@_unsupported
def get_fsdp2_grad_scaler(**kwargs: Any) -> Any: ...
