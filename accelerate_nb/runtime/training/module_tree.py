"""The modules and parameters of a model."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from accelerate_nb.config.did_you_mean import did_you_mean
from accelerate_nb.errors import ConfigurationError


def get_module_children_bottom_up(model: Module, return_fqns: bool = False) -> list[Any]:
    """
    All modules of a model, each after those inside it, the model itself last; with `return_fqns` pairs of dotted name and module.

    >>> get_module_children_bottom_up(torch.nn.Sequential(torch.nn.ReLU()))
    [ReLU(), Sequential(
      (0): ReLU()
    )]
    """
    waiting: list[tuple[str, Module]] = [("", model)]
    found: list[tuple[str, Module]] = []
    while waiting:
        name, module = waiting.pop()
        found.append((name, module))
        waiting.extend((f"{name}.{child}" if name else child, inner) for child, inner in module.named_children())
    found.reverse()
    return found if return_fqns else [module for _, module in found]


def get_module_class_from_name(module: Module, name: str) -> type[Module] | None:
    """The class of this name among those of a model's modules, the outermost first; `None` where there is none."""
    return next((found for item in module.modules() if (found := type(item)).__name__ == name), None)


def requested_class(model: Module, name: str, setting: str) -> type[Module]:
    """The class of this name among those of a model's modules; `ConfigurationError` names the setting that requests another one."""
    found = get_module_class_from_name(model, name)
    if found is None:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigurationError(
            f"The layer class {name} was requested by {setting}, and the model has none. "
            f"{did_you_mean(name, classes, '')} Its classes are {', '.join(classes)}.".replace("  ", " ")
        )
    return found


def model_has_dtensor(model: Module) -> bool:
    """Whether some weight of a model is spread over processes as a `DTensor`."""
    from torch.distributed.tensor import DTensor  # takes a third of torch's own time to import

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_model_tp_size(model: Any) -> int | None:
    """The number of processes over which transformers has split each layer of a model; `None` where it hasn't."""
    # transformers 4 keeps it in the model itself, 5 in its configuration
    size: int | None = getattr(model, "tp_size", None)
    if size is not None:
        return size
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    return config.get("tp_size") if isinstance(config, dict) else getattr(config, "tp_size", None)
