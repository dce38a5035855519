"""The devices on which a model's weights were put before `prepare`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.packages import is_bitsandbytes_multi_backend_available

# The device map's names for weights that are not on an accelerator.
_OFFLOADED = ("cpu", "disk")


def devices_of(model: Module) -> set[Any]:
    """The devices that transformers' `device_map` gave a model's weights; empty for one without a map."""
    return set(getattr(model, "hf_device_map", {}).values())


def has_places(model: Module) -> bool:
    """Whether a model was loaded with its weights on several devices, or quantised onto one, and can't be moved."""
    return _is_quantised(model) or len(devices_of(model)) > 1


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
