"""A model's weights by their original names, and optimizers whose model's weights were replaced by others."""

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

from torch.nn import Module, Parameter
from torch.optim import Optimizer

# The part of a name that torch's wrapper around what recomputes its activations adds.
CHECKPOINTED = "_checkpoint_wrapped_module."
# That which `torch.compile` adds to the names of a part.
_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")


def named_weights(model: Module) -> dict[str, Parameter]:
    """A model's weights by all of their names, without those of the wrappers that recompute activations."""
    named = model.named_parameters(remove_duplicate=False)
    return {name.replace(CHECKPOINTED, ""): weight for name, weight in named}


def original_name(name: str) -> str:
    """A weight's name without those of wrappers that recompute activations, or compile."""
    return _COMPILED.sub("", name.replace(CHECKPOINTED, ""))


def original_state(model: Module) -> dict[str, Any]:
    """A model's state under the names that it has without wrappers, where parts of it were compiled by hand."""
    state: dict[str, Any] = model.state_dict()
    names = [original_name(name) for name in state]
    return state if names == [*state] else dict(zip(names, state.values(), strict=True))


def load_original_state(model: Module, state: Mapping[str, Any], **options: Any) -> Any:
    """Give a model what `original_state` returned, or a state under the names of a model with other parts compiled."""
    own = {original_name(name): name for name in model.state_dict()}
    return model.load_state_dict({own.get(original_name(name), name): item for name, item in state.items()}, **options)


def replaced_weights(before: Mapping[str, Parameter], after: Mapping[str, Parameter]) -> dict[Parameter, Parameter]:
    """Of weights with the same name the former one with the one that took its place, where these are two."""
    return {weight: after[name] for name, weight in before.items() if name in after and after[name] is not weight}


def repoint(optimizer: Optimizer, replaced: MutableMapping[Parameter, Parameter]) -> None:
    """Have an optimizer update the weights that took the place of its own; what it remembers of a weight is dropped with it."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(weight, weight) for weight in group["params"]]
    for weight in [weight for weight in optimizer.state if weight in replaced]:
        del optimizer.state[weight]
