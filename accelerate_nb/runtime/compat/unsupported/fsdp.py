"""FSDP, which shards a model's weights over processes: its settings, and its functions' names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from accelerate_nb.runtime.compat.unsupported.base import Unsupported

_unsupported = Unsupported("FSDP", "Train with DDP: leave it out.")


@dataclass
@_unsupported
class FullyShardedDataParallelPlugin:
    """The configuration of sharded weights; `None` leaves a value to FSDP, or to the `FSDP_*` variables."""

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    def set_state_dict_type(self, state_dict_type: Any = None) -> Any: ...
    def set_auto_wrap_policy(self, model: Module) -> Any: ...
    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> Any: ...
    def validate_mixed_precision_policy(self) -> Any: ...
    def set_cpu_offload(self) -> Any: ...
    def validate_cpu_offload(self) -> Any: ...


@_unsupported
def enable_fsdp_ram_efficient_loading() -> Any: ...


def disable_fsdp_ram_efficient_loading() -> None:
    """Have transformers load weights on every process."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


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
