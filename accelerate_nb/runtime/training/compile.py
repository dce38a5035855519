"""The compilation of a model by `torch.compile`: as a whole, or block by block."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch.nn import Module, ModuleList

from accelerate_nb.config.run_config import setting_named
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.dataclasses import DynamoBackend, KwargsHandler, named

# What `accelerate.utils.other` offers.
__all__ = ["compile_regions", "has_compiled_regions", "has_repeated_blocks", "is_compiled_module", "is_repeated_blocks"]

# The settings that fill the fields of a plugin, and what these are without.
_VARIABLES: dict[str, tuple[str, Any]] = {
    "backend": ("dynamo_backend", "no"),
    "mode": ("dynamo_mode", "default"),
    "fullgraph": ("dynamo_use_fullgraph", False),
    "dynamic": ("dynamo_use_dynamic", None),
    "use_regional_compilation": ("dynamo_use_regional_compilation", False),
}


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """
    Arguments for `torch.compile`, with which `prepare` compiles models; `backend="no"` leaves them as they are.

    Fields left out come from the variables `ACCELERATE_DYNAMO_BACKEND`, `_MODE`, `_USE_FULLGRAPH`, `_USE_DYNAMIC` and
    `_USE_REGIONAL_COMPILATION`. With `use_regional_compilation` the repeated blocks of a model are compiled one by one: they
    share what was compiled for the first of them, so the first step begins sooner.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def _fill(self, environment: Mapping[str, str]) -> None:
        for name, (setting, default) in _VARIABLES.items():
            if getattr(self, name) is None:
                given = setting_named(setting).in_worker(environment)
                setattr(self, name, default if given is None else given)
        name = named(self.backend)
        if name.upper() not in DynamoBackend.list():
            known = ", ".join(repr(item.lower()) for item in DynamoBackend.list())
            raise ConfigurationError(f"The dynamo backend {name!r} is not known. Choose one of {known}.")
        self.backend = DynamoBackend(name.upper())

    def to_dict(self) -> dict[str, Any]:
        """All fields with their values; the backend is spelled as `torch.compile` takes it."""
        return {**super().to_dict(), "backend": named(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of `torch.compile` that differ from the default."""
        arguments = super().to_kwargs()
        arguments.pop("use_regional_compilation", None)
        return arguments

    def compiled(self, model: Module) -> Module:
        """The model under this plugin: compiled whole, block by block or not at all; one that is compiled stays as it is."""
        if self.backend == DynamoBackend.NO or is_compiled_module(model):
            return model
        if self.use_regional_compilation:
            return compile_regions(model, **self.to_kwargs())
        return _compiled(model, self.to_kwargs())


def choose_plugin(backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """The plugin of an `Accelerator`'s `dynamo_backend` or `dynamo_plugin`, of which one may be given."""
    if plugin is not None and backend is not None:
        raise ConfigurationError(
            "You cannot pass in both `dynamo_plugin` and `dynamo_backend`: "
            f"they are {plugin} and {named(backend)!r}. Pass one of them."
        )
    found = plugin or TorchDynamoPlugin(backend=backend)
    if DynamoBackend(found.backend).is_gone:
        raise ConfigurationError(
            f"The dynamo backend {named(found.backend).lower()!r} was requested, but torch does not have it any more. Choose "
            "'openxla' on XLA devices, or 'no': what is computed there is compiled in any case."
        )
    return found


def is_compiled_module(module: Any) -> bool:
    """Whether `torch.compile` made this module."""
    # decided by the instance's own modules: importing torch._dynamo to compare classes takes a second
    return isinstance(module, Module) and "_orig_mod" in module._modules


def has_compiled_regions(module: Module) -> bool:
    """Whether the module has, at any depth, a part that `torch.compile` made."""
    return any(is_compiled_module(part) for part in module.modules()) if module._modules else False


def is_repeated_blocks(module: Module) -> TypeGuard[ModuleList]:
    """Whether this is a list of modules that are all of the class of its first."""
    return (
        isinstance(module, ModuleList) and len(module) > 0 and all(isinstance(part, type(module[0])) for part in module)
    )


def has_repeated_blocks(module: Module) -> bool:
    """Whether the module has, at any depth, a list of modules of one class."""
    return any(is_repeated_blocks(part) for part in module.modules()) if module._modules else False


def compile_regions(module: Module, **compile_kwargs: Any) -> Module:
    """
    A twin of the module whose repeated blocks, and whatever stands beside them, are compiled each for itself.

    The twin shares parameters and buffers with the module, which stays as it is; `extract_model_from_parallel` finds it
    again. Arguments are those of `torch.compile`.

    >>> twin = compile_regions(torch.nn.Sequential(torch.nn.Linear(2, 2)), backend="eager")
    """
    twin = _regions(module, compile_kwargs, {})
    if not is_compiled_module(twin):
        twin.__dict__["_orig_mod"] = module
    return twin


def _regions(module: Module, arguments: dict[str, Any], twins: dict[int, Module]) -> Module:
    """The twin of a module, which is one under all names that the module has."""
    if id(module) not in twins:
        twins[id(module)] = _new_twin(module, arguments, twins)
    return twins[id(module)]


def _new_twin(module: Module, arguments: dict[str, Any], twins: dict[int, Module]) -> Module:
    if is_repeated_blocks(module):
        # children() would have a shared block once
        return ModuleList(_compiled(block, arguments) for block in module)
    if not has_repeated_blocks(module):
        return _compiled(module, arguments)
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():
        # a forward that was put on the instance, as mixed precision does, has to call the twin
        if isinstance(value, MethodType) and value.__self__ is module:
            twin.__dict__[name] = MethodType(value.__func__, twin)
    twin.__dict__["_modules"] = {
        name: None if part is None else _regions(part, arguments, twins) for name, part in module._modules.items()
    }
    return twin


def _compiled(module: Module, arguments: dict[str, Any]) -> Module:
    compiled: Module = torch.compile(module, **arguments)  # type: ignore[assignment]  # a module gives a module
    return compiled


def compile_regions_in_place(module: Module, **compile_kwargs: Any) -> Module:
    """Compile a module's repeated blocks, and whatever stands beside them, each for itself: its parts stay the objects that they are."""
    if is_repeated_blocks(module):
        for block in module.children():
            block.compile(**compile_kwargs)
    elif has_repeated_blocks(module):
        for part in module.children():
            compile_regions_in_place(part, **compile_kwargs)
    else:
        module.compile(**compile_kwargs)
    return module


def compile_layers(layers: Iterable[Module], how: TorchDynamoPlugin) -> None:
    """Compile modules each for itself, in place, where compiling is requested: for a model that is not called as a whole."""
    if how.backend != DynamoBackend.NO:
        for layer in layers:
            layer.compile(**how.to_kwargs())
