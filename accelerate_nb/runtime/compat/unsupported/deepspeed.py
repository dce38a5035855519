"""DeepSpeed: its settings, and its functions' names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.enums import DistributedType
from accelerate_nb.runtime.compat.unsupported.base import Unsupported
from accelerate_nb.runtime.world.accelerator_state import AcceleratorState, is_initialized

F = TypeVar("F", bound=Callable[..., Any])

_unsupported = Unsupported("DeepSpeed", "Train with DDP: leave it out.")


@dataclass
@_unsupported
class DeepSpeedPlugin:
    """The configuration of DeepSpeed; `None` leaves a value to DeepSpeed's configuration, or to the `ACCELERATE_*` variables."""

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    @property
    def selected(self) -> bool:
        """Whether this is the one of several plugins that is in force; none is yet."""
        return False

    def select(self, _from_accelerator_state: bool = False) -> Any: ...
    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> Any: ...
    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> Any: ...
    def is_auto(self, ds_key_long: str) -> Any: ...
    def get_value(self, ds_key_long: str, default: Any = None) -> Any: ...
    def set_mixed_precision(self, mixed_precision: str) -> Any: ...
    def set_deepspeed_weakref(self) -> Any: ...
    def is_zero3_init_enabled(self) -> Any: ...
    def zero3_init_context_manager(self, enable: bool = False) -> Any: ...
    def set_moe_leaf_modules(self, model: Module) -> Any: ...


class HfDeepSpeedConfig:
    """A configuration of DeepSpeed, read by dotted keys."""

    def __init__(self, config_file_or_dict: Any) -> None: ...
    def find_config_node(self, ds_key_long: str) -> Any: ...
    def get_value(self, ds_key_long: str, default: Any = None) -> Any: ...
    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> Any: ...
    def is_true(self, ds_key_long: str) -> Any: ...
    def is_false(self, ds_key_long: str) -> Any: ...
    def is_zero2(self) -> Any: ...
    def is_zero3(self) -> Any: ...
    def is_offload(self) -> Any: ...
    def set_stage_and_offload(self) -> Any: ...


class DeepSpeedEngineWrapper:
    """A DeepSpeed engine that the `Accelerator` runs backwards."""

    def __init__(self, engine: Any) -> None: ...
    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> Any: ...
    def get_global_grad_norm(self) -> Any: ...


class DeepSpeedOptimizerWrapper:
    """An optimizer that its engine steps."""

    def __init__(self, optimizer: Any) -> None: ...
    @property
    @_unsupported
    def step_was_skipped(self) -> Any: ...
    def step(self) -> Any: ...
    def zero_grad(self, set_to_none: bool | None = None) -> Any: ...


class DeepSpeedSchedulerWrapper:
    """A schedule that its engine moves."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None: ...
    def step(self) -> Any: ...


class DummyOptim:
    """A placeholder of the optimizer that DeepSpeed's configuration names."""

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None: ...


class DummyScheduler:
    """A placeholder of the schedule that DeepSpeed's configuration names."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None: ...


def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any: ...


_unsupported.all_of(globals())


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The plugin in force; `ConfigurationError` where the state is not one of DeepSpeed's."""
    if state.distributed_type != DistributedType.DEEPSPEED:
        raise ConfigurationError(
            "The active DeepSpeed plugin was requested, but this run doesn't use DeepSpeed. "
            "Read it only where the state's distributed_type is DEEPSPEED."
        )
    return state.deepspeed_plugin


def deepspeed_required(func: F) -> F:
    """A decorator: the function raises `ConfigurationError` where an `Accelerator` was made without DeepSpeed."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if is_initialized() and AcceleratorState().distributed_type != DistributedType.DEEPSPEED:
            raise ConfigurationError(
                f"{func.__name__} needs DeepSpeed, and the Accelerator of this process was made without it. "
                "Call it only in a run that uses DeepSpeed."
            )
        return func(*args, **kwargs)

    return cast("F", checked)
