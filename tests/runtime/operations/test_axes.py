"""Operations along an axis of the mesh reach the ranks along it, and no others."""

from typing import Any

import pytest
import torch

from accelerate_nb import ConfigurationError
from accelerate_nb.errors import OperationError
from accelerate_nb.runtime.operations.collective import broadcast, gather, gather_object, reduce
from accelerate_nb.runtime.training.accumulation import GradientState
from accelerate_nb.runtime.training.metrics import gather_for_metrics
from accelerate_nb.runtime.training.seed import synchronize_rng_state
from accelerate_nb.runtime.world.registry import along, use_mesh
from accelerate_nb.runtime.world.state import PartialState
from accelerate_nb.runtime.world.world import Mesh
from tests.ranks import run_on_ranks


def operations() -> dict[str, Any]:
    rank = PartialState(cpu=True).world.rank
    use_mesh(Mesh(dp_shard=2, tp=2))
    value = torch.tensor([float(rank)])
    torch.manual_seed(rank)
    synchronize_rng_state("torch", axis="tp")
    along("dp_shard").barrier()
    return {
        "all": gather(value).tolist(),
        "tp": gather(value, axis="tp").tolist(),
        "dp_shard": reduce(value, "sum", axis="dp_shard").tolist(),
        "from the second along tp": broadcast(value, 1, axis="tp").tolist(),
        "objects": gather_object([rank], axis="dp_shard"),
        "both": reduce(value, "sum", axis=("dp_shard", "tp")).tolist(),
        "no degree": gather(value, axis="cp").tolist(),
        "metrics": gather_for_metrics(value, GradientState()).tolist(),
        "random": torch.initial_seed() if rank % 2 == 0 else torch.rand(1).tolist(),
    }


@pytest.mark.timeout(120)
def test_an_axis_is_the_ranks_along_it() -> None:
    found = run_on_ranks(operations, 4)
    assert [item["all"] for item in found] == [[0, 1, 2, 3]] * 4
    assert [item["tp"] for item in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [item["dp_shard"] for item in found] == [[2], [4], [2], [4]]
    assert [item["from the second along tp"] for item in found] == [[1], [1], [3], [3]]
    assert [item["objects"] for item in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [item["both"] for item in found] == [[6]] * 4
    assert [item["no degree"] for item in found] == [[0], [1], [2], [3]]
    assert [item["metrics"] for item in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for first in (0, 2):
        torch.manual_seed(first)
        assert found[first + 1]["random"] == torch.rand(1).tolist()


def calls_that_differ() -> str:
    rank = PartialState(cpu=True).world.rank
    use_mesh(Mesh(dp_shard=2, tp=2))
    with pytest.raises(OperationError) as caught:
        gather(torch.ones(1 + rank % 2), axis="tp")
    return str(caught.value)


def test_calls_that_do_not_fit_along_an_axis_are_an_error_on_its_ranks() -> None:
    for text in run_on_ranks(calls_that_differ, 4):
        assert "made calls that don't fit together" in text
        assert "rank 1: gather" in text
        assert "rank 2: " not in text


def test_an_axis_that_no_mesh_has_is_refused_with_those_that_it_has() -> None:
    PartialState(cpu=True)
    message = r"The axis width was requested\. Known axes of a mesh are pp, dp_replicate"
    with pytest.raises(ConfigurationError, match=message):
        along("width")
