"""The weights of a model that its hooks keep elsewhere until they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import StateError
from accelerate_nb.runtime.training.repoint import original_name


def complete(model: Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """
    A model's state with the weights that its hooks have, on the CPU or in files, in place of those on the meta device.

    A hook that keeps weights has `offload=True` and a `weights_map` of them by their names in its module, as those of
    `dispatch_model` do here and in Accelerate. A `StateError` names a weight that no hook has.
    """
    whole = dict(state)
    if any(_is_missing(value) for value in whole.values()):
        for path, module in model.named_modules(remove_duplicate=False):
            for hook in offloading_hooks(module):
                if hook.weights_map is not None:
                    _fill(whole, original_name(f"{path}." if path else ""), hook.weights_map)
    missing = [name for name, value in whole.items() if _is_missing(value)]
    if missing:
        raise StateError(
            "You can't save the model since some parameters are on the meta device, and no hook has them: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. Load them first."
        )
    return whole


def _is_missing(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def offloading_hooks(module: Module) -> Iterator[Any]:
    """The hooks that bring a module's weights for each forward, alone or among others."""
    hook: Any = getattr(module, "_hf_hook", None)
    # decided by their attributes, so that models which Accelerate has dispatched are understood too
    for item in getattr(hook, "hooks", (hook,)):
        if getattr(item, "offload", False) is True and hasattr(item, "weights_map"):
            yield item


def _fill(state: dict[str, Any], prefix: str, weights: Mapping[str, Tensor]) -> None:
    for name, value in state.items():
        if _is_missing(value) and name.startswith(prefix):
            try:
                found = weights[name.removeprefix(prefix)]
            except KeyError:
                continue  # another hook's
            # a file may hold wider numbers than those that the model computes with
            state[name] = found.to(device="cpu", dtype=value.dtype)
