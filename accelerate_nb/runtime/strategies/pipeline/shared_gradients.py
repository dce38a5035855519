"""Gradients of weights that several stages have: each stage computes a part, and all of them get the sum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from accelerate_nb.runtime.training.repoint import named_weights
from accelerate_nb.runtime.world.world import World


class SharedGradients:
    """
    The weights that several stages have, by a name of each, with the groups of these stages' processes.

    A weight whose stages are all of this process has no group. `counted` are the names of those whose gradients count in this
    process's part of a norm. `pipelines` is the world of the processes that have the same stages for other batches.
    """

    def __init__(
        self, model: Module, names: Iterable[str], groups: Mapping[str, Any], counted: Iterable[str], pipelines: World
    ) -> None:
        self.model, self.names, self.groups, self.pipelines = model, sorted(names), groups, pipelines
        self._counted = set(counted)

    def _weights(self) -> list[tuple[str, Tensor]]:
        weights = named_weights(self.model)
        return [(name, weights[name]) for name in self.names if not weights[name].is_meta]

    @property
    def uncounted(self) -> set[int]:
        """The weights, by `id`, that another process counts."""
        return {id(weight) for name, weight in self._weights() if name not in self._counted}

    @contextmanager
    def added(self) -> Iterator[None]:
        """A block with a backward; the sums of its gradients over stages, averaged over pipelines, are added to what was there."""
        weights = [(name, weight) for name, weight in self._weights() if weight.requires_grad]
        before = [weight.grad for _, weight in weights]
        for _, weight in weights:
            weight.grad = None
        yield
        for (name, weight), earlier in zip(weights, before, strict=True):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            if name in self.groups:
                dist.all_reduce(weight.grad, group=self.groups[name])
            if self.pipelines.size > 1:
                dist.all_reduce(weight.grad, group=self.pipelines.group)
                weight.grad.div_(self.pipelines.size)
            if earlier is not None:
                weight.grad.add_(earlier)


def groups_of_stages(world: World, along: World, shared: Mapping[str, Iterable[int]]) -> dict[str, Any]:
    """
    The group of the processes, given by their indices along the pipeline, that share a weight, for each of these weights.

    All processes call it; a weight that this process does not have, or has alone, is left out.
    """
    made: dict[tuple[int, ...], Any] = {}
    found: dict[str, Any] = {}
    pipelines = sorted({world.mesh.ranks_along(rank, "pp") for rank in range(world.size)})
    for name, indices in shared.items():
        held = sorted(set(indices))
        for pipeline in pipelines if 1 < len(held) < along.size else ():
            ranks = tuple(pipeline[index] for index in held)
            if ranks not in made:
                made[ranks] = dist.new_group(list(ranks))
        if len(held) > 1 and along.rank in held:
            own = tuple(world.mesh.ranks_along(world.rank, "pp")[index] for index in held)
            found[name] = made.get(own, along.group)
    return found
