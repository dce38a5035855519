"""The stages of a model: by count, by names, and by measured cost."""

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_nb import ConfigurationError
from accelerate_nb.runtime.strategies.pipeline.staged_model import balanced, layers_of, plan_stages, shared_by_stages


class Model(nn.Module):
    """An embedding, blocks, a norm and a head, and a weight of the model itself."""

    def __init__(self, blocks: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))})
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(numbers)
        for block in self.body["blocks"]:
            hidden = hidden + block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden)) * self.scale
        return logits


NAMES = ["embedding", *(f"body.blocks.{index}" for index in range(4)), "norm", "head"]


def stages(model: nn.Module, count: int, *args: Any) -> list[int]:
    return [layer.stage for layer in plan_stages(model, count, *args)]


def test_layers_are_blocks_and_what_stands_beside_them() -> None:
    assert [name for name, _ in layers_of(Model())] == NAMES
    assert [name for name, _ in layers_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))] == ["0", "2"]
    # modules of a class that is named stay whole
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.LayerNorm(2))
    assert [name for name, _ in layers_of(model, ["Sequential"])] == ["0", "1"]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("costs", [[3, 1, 4, 1, 5, 9, 2, 6], [1] * 8, [0, 0, 7, 0, 0], [9, 1, 1, 1, 1]])
def test_the_largest_stage_is_as_small_as_any_cut_makes_it(costs: list[int], count: int) -> None:
    def largest(starts: Any) -> int:
        edges = [0, *starts, len(costs)]
        return max(sum(costs[begin:end]) for begin, end in pairwise(edges))

    found = balanced(costs, count)
    assert len(set(found)) == count - 1
    assert largest(found) == min(map(largest, combinations(range(1, len(costs)), count - 1)))


def test_stages_have_about_equally_many_weights_or_operations_or_begin_at_names() -> None:
    # 40 in the embedding, 20 in each block, 8 in the norm, 40 in the head
    assert stages(Model(), 2) == [0, 0, 0, 1, 1, 1, 1]
    # of 2 numbers a block takes 64 operations and the head 160, and looking up a row takes none
    example = torch.zeros(2, dtype=torch.long)
    assert stages(Model(), 2, "auto", (example,)) == [0, 0, 0, 0, 1, 1, 1]
    assert stages(Model(), 2, "auto", {"numbers": example}) == [0, 0, 0, 0, 1, 1, 1]
    assert stages(Model(), 3, ["body.blocks.3", "head"]) == [0, 0, 0, 0, 1, 1, 2]
    assert stages(Model(), 2, ["body"]) == [0, 1, 1, 1, 1, 1, 1]


def test_weights_that_several_stages_have_are_found() -> None:
    model = Model(tied=True)
    shared = shared_by_stages(plan_stages(model, 3), model)
    assert shared == {model.embedding.weight: {0, 2}, model.scale: {0, 1, 2}}


@pytest.mark.parametrize(
    ("count", "begins", "message"),
    [
        (8, "auto", "8 stages of a pipeline were requested, but Model has 7 layers"),
        (2, ["body.blocks.9"], "begin at 'body.blocks.9', but the model has no layer of this name"),
        (2, ["norm", "head"], "2 stages of a pipeline were requested, and the beginnings of 3: norm, head"),
        (3, ["head", "norm"], "but the model's layers stand in the order embedding"),
        (2, ["embedding"], "and not the first layer"),
    ],
)
def test_stages_that_can_not_be_are_refused(count: int, begins: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_stages(Model(), count, begins)
    # also example inputs that do not fit
    with pytest.raises(ConfigurationError, match=r"operations of Model could not be counted .* name the split_points"):
        plan_stages(Model(), 2, "auto", (torch.zeros(2), 3))
