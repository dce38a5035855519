"""Weights that stage 3 keeps in parts, whole for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.nn import Module


def is_in_parts(weight: Any) -> bool:
    """Whether a weight is one of stage 3's."""
    return hasattr(weight, "ds_id")


def gathered(
    weights: Iterable[Tensor] | Tensor, modifier_rank: int | None = None, fwd_module: Module | None = None
) -> AbstractContextManager[Any]:
    """
    A block in which weights are whole on every process; all processes enter it.

    What `modifier_rank` changes in them is on all processes after it; without one, changes are lost.
    """
    from deepspeed.runtime.zero import GatheredParameters

    found = [weights] if isinstance(weights, Tensor) else list(weights)
    return GatheredParameters(  # type: ignore[no-any-return]  # the package has no types
        [weight for weight in found if is_in_parts(weight)], modifier_rank=modifier_rank, fwd_module=fwd_module
    )


def complete_state(model: Module, *, is_kept: bool) -> dict[str, Any]:
    """
    A model's complete weights and buffers by name, copied to the CPU where they are in parts, and `is_kept`; all processes call it.

    One module's weights are whole at a time. Where nothing is in parts it is the model's own `state_dict`.
    """
    if not any(map(is_in_parts, model.parameters())):
        return model.state_dict()
    own = model.state_dict(keep_vars=True)
    found: dict[str, Any] = {}
    for names, weights in _by_module(own):
        with gathered(weights):
            if is_kept:
                found |= {name: _copy(weight) for name, weight in zip(names, weights, strict=True)}
    return {name: found[name] for name in own if name in found}


def _by_module(state: dict[str, Any]) -> Iterator[tuple[list[str], list[Any]]]:
    names: list[str] = []
    for name in state:
        if names and name.rpartition(".")[0] != names[0].rpartition(".")[0]:
            yield names, [state[item] for item in names]
            names = []
        names.append(name)
    if names:
        yield names, [state[item] for item in names]


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().cpu().clone() if is_in_parts(value) else value.detach()
