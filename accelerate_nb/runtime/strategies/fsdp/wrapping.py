"""The parts of a model whose weights are gathered and freed together."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.nn import Module, ModuleDict, ModuleList, Parameter

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
from accelerate_nb.runtime.training.compile import is_repeated_blocks

CHECKPOINTED = "_checkpoint_wrapped_module"


def blocks_of(model: Module, plugin: FullyShardedDataParallelPlugin) -> list[Module]:
    """The modules that are sharded each for itself, the innermost first, without the model itself."""
    # one weight belongs to one part: a module that shares one with what is outside of it is left to the model, as is a list
    chosen = block_policy(model, plugin)
    shared = shared_weights(model)
    return [
        module
        for module in _bottom_up(model)
        if module is not model
        and not isinstance(module, (ModuleList, ModuleDict))
        and chosen(inner(module))
        and not _shares_outside(module, shared)
    ]


def inner(module: Module) -> Module:
    """A module without the wrapper that recomputes its activations."""
    while (wrapped := module._modules.get(CHECKPOINTED)) is not None:
        module = wrapped
    return module


def block_policy(model: Module, plugin: FullyShardedDataParallelPlugin) -> Callable[[Module], bool]:
    """The function that says of a module whether it is one of these."""
    settings = copy(plugin)  # what it finds in this model is not for another
    settings.set_auto_wrap_policy(model)
    policy: Any = settings.auto_wrap_policy
    function = getattr(policy, "func", policy)
    if function is size_based_auto_wrap_policy:
        least = getattr(policy, "keywords", {}).get("min_num_params", settings.min_num_params or 0)
        return lambda module: _size(module) > least
    if function is transformer_auto_wrap_policy and (classes := tuple(policy.keywords["transformer_layer_cls"])):
        return lambda module: isinstance(module, classes)
    if policy is not None and function is not transformer_auto_wrap_policy:
        return lambda module: bool(policy(module=module, recurse=False, nonwrapped_numel=_size(module)))
    names = getattr(model, "_no_split_modules", None) or ()
    repeated = {id(block) for block in _repeated_blocks(model)}
    return lambda module: type(module).__name__ in names if names else id(module) in repeated


def _repeated_blocks(module: Module) -> Iterator[Module]:
    """The elements of the outermost lists of equal modules; what such elements have in lists of their own is small."""
    for child in module.children():
        yield from child.children() if is_repeated_blocks(child) else _repeated_blocks(child)


def _size(module: Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _bottom_up(module: Module) -> Iterator[Module]:
    """A module's parts before the module itself, each once."""
    seen: set[int] = set()

    def walk(part: Module) -> Iterator[Module]:
        seen.add(id(part))
        for child in part.children():
            if id(child) not in seen:
                yield from walk(child)
        yield part

    return walk(module)


def shared_weights(model: Module) -> dict[int, list[Module]]:
    """For each weight that several modules have under a name of their own, those modules."""
    owners: dict[int, list[Module]] = {}
    for module in model.modules():
        for weight in module._parameters.values():
            if weight is not None:
                owners.setdefault(id(weight), []).append(module)
    return {weight: modules for weight, modules in owners.items() if len(modules) > 1}


def _shares_outside(module: Module, shared: dict[int, list[Module]]) -> bool:
    if not shared:
        return False
    inside = {id(part) for part in module.modules()}
    return any(id(owner) not in inside for weight in module.parameters() for owner in shared.get(id(weight), ()))


def ignored_weights(model: Module, ignored: Iterable[Module] | str | None) -> set[Parameter]:
    """The weights that every process keeps whole: those of modules, or of a pattern of their names, and what has no numbers."""
    empty = {weight for weight in model.parameters() if weight.numel() == 0}
    if ignored is None:
        return empty
    if not isinstance(ignored, str):
        return empty | {weight for module in ignored for weight in module.parameters()}
    pattern = re.compile(ignored)
    found = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    if not found:
        raise ConfigurationError(
            f"ignored_modules={ignored!r} was requested, but no module's name matches it. Names are "
            f"{', '.join([name for name, _ in model.named_modules() if name][:8])}, …"
        )
    return empty.union(*(module.parameters() for module in found))


def check_shapes(model: Module, ignored: set[Parameter]) -> None:
    """Raise `ConfigurationError` where a weight has no dimension along which it could be cut."""
    numbers = [name for name, weight in model.named_parameters() if weight.ndim == 0 and weight not in ignored]
    if numbers:
        raise ConfigurationError(
            f"The model's {', '.join(numbers)} should be sharded, but has no dimension along which it could be cut. Make it a "
            "tensor of one element, `torch.zeros(1)` for `torch.tensor(0.0)`, or freeze it and name its module in "
            "`ignored_modules`."
        )


def checkpoint_activations(model: Module, blocks: Sequence[Module], *, offload: bool) -> list[Module]:
    """Have blocks recompute activations in the backward, with `offload` from inputs on the CPU; returns the wrapped blocks."""
    wrapped = {id(block): checkpoint_wrapper(block, preserve_rng_state=True) for block in blocks}
    if offload:
        wrapped = {key: offload_wrapper(block) for key, block in wrapped.items()}
    for parent in list(model.modules()):
        # a block may have several names, of which `named_children` gives one
        for name, child in list(parent._modules.items()):
            if id(child) in wrapped and wrapped[id(child)] is not parent and not name.startswith("_checkpoint_wrapped"):
                setattr(parent, name, wrapped[id(child)])
    return [wrapped[id(block)] for block in blocks]
