"""The model inside its wrappers, and the modules inside a model."""

from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from accelerate_nb.config.value_types import did_you_mean
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.precision.base import restore_forward
from accelerate_nb.runtime.training.compile import is_compiled_module


class ModelWrapper(Module):
    """The base of modules of ours that stand around a model; `module` is the model."""

    # results are brought back without it
    is_model_wrapper = True

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module


_COPIES = (DistributedDataParallel, torch.nn.DataParallel, ModelWrapper)
# The classes of engines, of packages that are not loaded before they are used; `module` is the model, too.
ENGINES: set[type] = set()


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """
    The model inside of `DistributedDataParallel` or `DataParallel`.

    A compiled model is compiled still, unless `keep_torch_compile=False`; its mixed-precision forward is taken off where
    `keep_fp32_wrapper=False`; with `recursive` its children are taken out of what is around them, too. The prepared model
    stays as it was.
    """
    inner = bare(model)
    found = _inside_all(inner) if recursive else inner
    if not keep_fp32_wrapper:
        restore_forward(found)
    return _compiled_around(model, inner) if keep_torch_compile and found is inner else found


def bare(model: Any) -> Any:
    """The model without copies and compilation around it: its weights have their original names."""
    while (inner := _wrapped_module(model)) is not None:
        model = inner
    return model


def copies_in(model: Any) -> DistributedDataParallel | None:
    """The `DistributedDataParallel` that a prepared model is, or that is compiled in it."""
    while model is not None and not isinstance(model, DistributedDataParallel):
        model = _wrapped_module(model)
    return model


def _wrapped_module(model: Any) -> Any:
    if not isinstance(model, Module):
        return None
    if is_compiled_module(model):
        return model._modules["_orig_mod"]
    if "_orig_mod" in model.__dict__:  # what `compile_regions` leaves on the twin that it makes
        return model.__dict__["_orig_mod"]
    return model.module if isinstance(model, (*_COPIES, *ENGINES)) else None


def _compiled_around(model: Any, inner: Any) -> Any:
    """The compiled model that has `inner` right inside; it is made, and then kept, where copies stand between them."""
    compiled = None
    while model is not inner:
        if not isinstance(model, (*_COPIES, *ENGINES)) or "_orig_mod" in model.__dict__:
            compiled = model
        model = _wrapped_module(model)
    if compiled is None or _wrapped_module(compiled) is inner:
        return inner if compiled is None else compiled
    if "_without_copies" not in compiled.__dict__:
        compiled.__dict__["_without_copies"] = _around(compiled, inner)
    return compiled.__dict__["_without_copies"]


def _around(compiled: Any, inner: Module) -> Module:
    if is_compiled_module(compiled):
        # it calls what it was made around, so another one is needed that calls what is inside of that
        return type(compiled)(inner, compiled.dynamo_ctx)  # type: ignore[no-any-return]  # a class of torch's own
    while isinstance(compiled, _COPIES):
        compiled = compiled.module
    if not is_compiled_module(compiled):
        compiled.__dict__["_orig_mod"] = inner
    return compiled  # type: ignore[no-any-return]  # the module of a module


def _inside_all(module: Module) -> Module:
    while isinstance(getattr(module, "module", None), Module):
        module = module.module  # type: ignore[assignment]  # just checked
    for name, child in module.named_children():
        setattr(module, name, _inside_all(child))
    return module


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


def is_peft_model(model: Any) -> bool:
    """Whether the model, or the one inside of its parallel wrapper, is PEFT's."""
    bases = type(extract_model_from_parallel(model)).__mro__
    return any(base.__name__ == "PeftModel" and base.__module__.startswith("peft.") for base in bases)


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
