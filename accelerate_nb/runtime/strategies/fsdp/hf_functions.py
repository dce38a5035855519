"""Accelerate's functions for FSDP, which other libraries call."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from accelerate_nb.runtime.strategies.fsdp.plugin import FullyShardedDataParallelPlugin

# What `accelerate.utils.fsdp_utils` offers.
__all__ = [
    "fsdp2_apply_ac", "fsdp2_canonicalize_names", "fsdp2_load_full_state_dict", "fsdp2_prepare_auto_wrap_policy",
    "fsdp2_prepare_model", "fsdp2_switch_optimizer_parameters", "get_fsdp2_grad_scaler", "get_parameters_from_modules",
]  # fmt: skip


def fsdp2_prepare_model(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """The model, sharded in place as `accelerator.prepare` does."""
    prepared: torch.nn.Module = accelerator.prepare_model(model)
    return prepared


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: torch.nn.Module
) -> Callable[[torch.nn.Module], bool]:
    """The function that says of a module whether it is sharded for itself."""
    from accelerate_nb.runtime.strategies.fsdp.strategy import block_policy

    return block_policy(model, fsdp2_plugin)


def fsdp2_apply_ac(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """The model, whose blocks recompute their activations in the backward."""
    from accelerate_nb.runtime.strategies.fsdp.strategy import blocks_of, checkpoint_activations

    plugin = accelerator.state.fsdp_plugin
    checkpoint_activations(model, blocks_of(model, plugin), offload=plugin.activation_checkpointing_offload)
    return model


def fsdp2_load_full_state_dict(
    accelerator: Any,  # noqa: ARG001 - the model knows its processes
    model: torch.nn.Module,
    full_sd: Mapping[str, Any],
    cpu_offload: bool = False,
) -> torch.nn.Module:
    """The sharded model with complete weights, which the first process has; the others may pass an empty dictionary."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
    set_model_state_dict(model, dict(full_sd), options=options)
    return model


def fsdp2_switch_optimizer_parameters(optimizer: Optimizer, mapping: Mapping[int, torch.nn.Parameter]) -> None:
    """Have an optimizer update other weights, by the `data_ptr` of its own; `KeyError` for one that is missing."""
    for group in optimizer.param_groups:
        # Accelerate puts a number in the method's place
        addresses = [weight.data_ptr() if callable(weight.data_ptr) else weight.data_ptr for weight in group["params"]]
        group["params"] = [mapping[address] for address in addresses]


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """The values under names without those of wrappers that compile, or recompute activations."""
    return {
        name.replace("._checkpoint_wrapped_module", "").replace("._orig_mod", "").removeprefix("_orig_mod."): value
        for name, value in named_params.items()
    }


def get_parameters_from_modules(
    modules: Iterable[torch.nn.Module] | str | None, model: torch.nn.Module, device: torch.device | str
) -> set[torch.nn.Parameter]:
    """The weights of modules, or of those whose names a pattern matches, which come to a device."""
    from accelerate_nb.runtime.strategies.fsdp.strategy import ignored_weights

    found = ignored_weights(model, modules)
    for weight in found if isinstance(modules, str) else ():
        weight.data = weight.data.to(device)
    return found


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Torch's scaler of gradients, which knows sharded ones."""
    return torch.amp.GradScaler(**kwargs)
