"""What an optimizer remembers, by its weights: whole as this process's model has them, whichever parts its copies keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from accelerate_nb.errors import NotYetError

# The 32-bit copy of a weight of 16 bits, as Megatron calls it.
COPY = "fp32_param"
# The tensor that an optimizer updates, and the part of the flat weight that it is.
Kept = tuple[Tensor, slice]


def options_of(inner: Any) -> list[dict[str, Any]]:
    """The settings of each group of weights, such as its learning rate."""
    return [{name: value for name, value in group.items() if name != "params"} for group in _groups(inner)]


def states_of(inner: Any, weights: Sequence[Tensor], is_written: Sequence[bool]) -> list[dict[str, Tensor]]:
    """
    The tensors of each weight by their names: of its shape, or single numbers.

    Where copies have parts, all of them call it, and those get numbers that write the weight. `NotYetError` for an optimizer that
    remembers something else.
    """
    kept = _kept(inner)
    own = [_own_states(inner, weight, kept.get(id(weight))) for weight in weights]
    if not isinstance(inner, DistributedOptimizer):
        return own
    group = inner.data_parallel_group
    facts = [{name: value.item() if value.dim() == 0 else None for name, value in values.items()} for values in own]
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, facts, group)
    merged = [dict(chain.from_iterable(found[index].items() for found in gathered)) for index in range(len(weights))]
    return [
        {
            name: _whole(weight, kept.get(id(weight)), values.get(name), group, is_kept=is_kept)
            if number is None
            else torch.tensor(number, dtype=torch.float32)
            for name, number in sorted(names.items())
        }
        for weight, values, names, is_kept in zip(weights, own, merged, is_written, strict=True)
    ]


def set_states(
    inner: Any, weights: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], options: Sequence[dict[str, Any]]
) -> None:
    """Have what `states_of` and `options_of` returned, and nothing else."""
    kept, numbers = _kept(inner), _numbers(inner)
    state: dict[int, dict[str, Tensor]] = {}
    for weight, values in zip(weights, states, strict=True):
        found = kept.get(id(weight))
        if found is None:
            continue
        main, part = found
        own = {
            name: value if value.dim() == 0 else value.flatten()[part].clone().view(main.shape)
            for name, value in values.items()
        }
        if (copy := own.pop(COPY, None)) is not None:
            main.data.copy_(copy)
        if own:
            state[numbers[id(main)]] = own
    indices = iter(range(len(numbers)))
    groups = [
        {**saved, "params": [next(indices) for _ in group["params"]]}
        for saved, group in zip(options, _groups(inner), strict=True)
    ]
    inner.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _groups(inner: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = inner.optimizer.param_groups
    return groups


def _numbers(inner: Any) -> dict[int, int]:
    """The number of each tensor that the optimizer updates, as torch counts them."""
    return {
        id(main): number for number, main in enumerate(main for group in _groups(inner) for main in group["params"])
    }


def _kept(inner: Any) -> dict[int, Kept]:
    """By each weight's identity what this process's optimizer updates of it."""
    if isinstance(inner, DistributedOptimizer):
        found = {}
        for weight, (group, number) in inner.model_param_group_index_map.items():
            part = inner._get_model_param_range_map(weight)["param"]
            found[id(weight)] = (_groups(inner)[group]["params"][number], slice(part.start, part.end))
        return found
    own = {id(main): (main, slice(None)) for group in _groups(inner) for main in group["params"]}
    weights = chain.from_iterable(getattr(inner, "float16_groups", ()))
    copies = chain.from_iterable(getattr(inner, "fp32_from_float16_groups", ()))
    return {**own, **{id(weight): (copy, slice(None)) for weight, copy in zip(weights, copies, strict=True)}}


def _own_states(inner: Any, weight: Tensor, kept: Kept | None) -> dict[str, Tensor]:
    if kept is None:
        return {}
    main = kept[0]
    found: dict[str, Any] = {
        name: value for name, value in inner.optimizer.state.get(main, {}).items() if value is not None
    }
    for name, value in found.items():
        if not isinstance(value, Tensor) or (value.dim() > 0 and value.shape != main.shape):
            raise NotYetError(
                f"save_state was called with {type(inner.optimizer).__name__}, which remembers {name!r} of a weight: neither a tensor of "
                "the weight's shape nor a single number, which are what checkpoints of Megatron keep here so far. Train with AdamW, SGD "
                "or the like, or save the weights with accelerator.save_model(model, folder)."
            )
    if weight.dtype != torch.float32:
        found[COPY] = main
    return {
        name: value.detach().view(weight.shape) if value.numel() == weight.numel() and value.dim() > 0 else value
        for name, value in found.items()
    }


def _whole(weight: Tensor, kept: Kept | None, value: Tensor | None, group: Any, *, is_kept: bool) -> Tensor:
    """A tensor of the weight's shape, put together from the parts of all copies, each of which has zeros elsewhere."""
    whole = torch.zeros(weight.numel(), device=weight.device)
    if kept is not None and value is not None:
        whole[kept[1]] = value.flatten()
    dist.all_reduce(whole, group=group)
    return whole.view(weight.shape).cpu() if is_kept else torch.zeros(()).expand(weight.shape)
