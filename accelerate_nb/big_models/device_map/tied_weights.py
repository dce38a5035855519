"""Weights that one model uses under several names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch.nn import Module

from accelerate_nb.big_models.device_map.check import device_of
from accelerate_nb.big_models.devices import DeviceMap
from accelerate_nb.big_models.tensors import owner_of, tensor_of

logger = logging.getLogger("accelerate_nb.utils.modeling")


def find_tied_parameters(model: Module, **kwargs: Any) -> list[list[str]]:  # noqa: ARG001 - Accelerate's own recursion used it
    """
    The names of parameters that are one and the same, a sorted list for each such parameter.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> model[1].weight = model[0].weight
    >>> find_tied_parameters(model)
    [['0.weight', '1.weight']]
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def retie_parameters(model: Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make the parameters of each group one again: the first of them that is not on the `meta` device."""
    for group in tied_params:
        whole = next((name for name in group if not tensor_of(model, name).is_meta), None)
        if whole is None:
            continue
        parameter = tensor_of(model, whole)
        for name in group:
            owner, leaf = owner_of(model, name)
            setattr(owner, leaf, parameter)


def check_tied_parameters_in_config(model: Module) -> bool:
    """Whether the configuration of a model of transformers ties some of its weights."""
    if not any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        return False
    config: Any = getattr(model, "config", None)
    decoder = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    if getattr(decoder, "tie_word_embeddings", False) and model.get_output_embeddings():  # type: ignore[operator]
        return True
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False):
        return True
    return any(hasattr(module, "_tie_weights") for module in model.modules())


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: DeviceMap) -> None:
    """Warn of each group of tied parameters that a device map puts on several devices."""
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            logger.warning(
                "Tied parameters are on different devices: %s. They will be one weight no longer, or be copied. "
                "Put them on one device, or let device_map='auto' choose.",
                devices,
            )


def warn_if_untied(model: Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Warn where a model's configuration ties weights that are not tied in the model."""
    if not tied_params and check_tied_parameters_in_config(model):
        logger.warning(
            "The model weights are not tied, though the model's configuration ties them. "
            "Call `model.tie_weights()` before the model is placed."
        )
