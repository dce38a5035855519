"""The devices on which a model's weights were put before `prepare`."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.checkpoints.host_copy import offloading_hooks
from accelerate_nb.runtime.compat.packages import is_bitsandbytes_multi_backend_available
from accelerate_nb.user_warnings import warn_user

# The device map's names for weights that are not on an accelerator.
_OFFLOADED = ("cpu", "disk")


def devices_of(model: Module) -> set[Any]:
    """The devices that transformers' `device_map` gave a model's weights; empty for one without a map."""
    return set(getattr(model, "hf_device_map", {}).values())


def has_places(model: Module) -> bool:
    """Whether a model was loaded with its weights on several devices, offloaded, or quantised onto one, and can't be moved."""
    is_away = any(parameter.is_meta for parameter in model.parameters())
    return _is_quantised(model) or is_away or len(devices_of(model)) > 1


def check_loaded(model: Module, optimizers: Iterable[Optimizer], *, is_trained: bool) -> None:
    """Raise `ConfigurationError` for a model without weights, or whose weights that learn are kept elsewhere by hooks."""
    away = {name: item for name, item in chain(model.named_parameters(), model.named_buffers()) if item.is_meta}
    kept = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for hook in offloading_hooks(module)
        for name, _ in chain(module.named_parameters(), module.named_buffers())
    }
    if empty := [name for name in away if name not in kept]:
        raise ConfigurationError(
            f"prepare was given a {type(model).__name__} without weights: {_shortened(empty)} on the meta device, as init_empty_weights "
            "makes them. Load them first, by load_checkpoint_and_dispatch or `model.load_state_dict(state, assign=True)`; "
            "`to_empty` would leave them random."
        )
    learning = {name: item for name, item in away.items() if item.requires_grad}
    if not learning or not is_trained:
        return
    weights = {id(item) for item in learning.values()}
    changes = any(
        id(item) in weights for optimizer in optimizers for group in optimizer.param_groups for item in group["params"]
    )
    text = (
        f"prepare was given a {type(model).__name__} whose hooks keep weights on the CPU or the disk ({_shortened(list(learning))}), as "
        "those of cpu_offload, disk_offload and dispatch_model do. They are brought for each forward, and no optimizer can change "
        "them. "
    )
    if changes or len(devices_of(model)) < 2:
        raise ConfigurationError(
            f"{text}To train it, load all of it, or use FSDP or DeepSpeed, which offload what learns; `requires_grad_(False)` freezes "
            "weights; `prepare_model(model, evaluation_mode=True)` takes it for inference."
        )
    warn_user(f"{text}These do not learn. For inference, call `prepare_model(model, evaluation_mode=True)`.")


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more}"


def check_quantised(model: Module, device: torch.device) -> None:
    """Raise a `ConfigurationError` for a model in 8 or 4 bits whose weights can't be trained on their devices."""
    places = {str(device) for device in devices_of(model)}
    if not _is_quantised(model) or not places:
        return
    is_away = "cpu" in places and not (device.type == "cpu" and is_bitsandbytes_multi_backend_available())
    if "disk" in places or is_away:
        raise ConfigurationError(
            "You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk offload: its weights "
            f"lie on {', '.join(sorted(places))}. Load it with all of it on {device}; a newer bitsandbytes trains on a CPU too."
        )
    if len(places) == 1 and not places & {str(device), str(device.index or 0), device.type, *_OFFLOADED}:
        raise ConfigurationError(
            "You can't train a model that has been loaded in 8-bit or 4-bit precision on a different device than the one "
            f"you're training on: its weights lie on {places.pop()}, and this process works on {device}. Load it with "
            f"device_map={{'': {str(device)!r}}}."
        )


def _is_quantised(model: Module) -> bool:
    return bool(getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False))
