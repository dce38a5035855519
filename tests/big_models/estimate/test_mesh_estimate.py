"""What each rank of a mesh was estimated to hold is what it really holds, and the smallest mesh is one that fits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate_nb import Accelerator, ConfigurationError, ParallelismConfig
from accelerate_nb.big_models.estimate.mesh_estimate import on_mesh, smallest_mesh
from accelerate_nb.big_models.estimate.model_outline import of_module
from accelerate_nb.runtime.operations.sharded_tensors import local
from accelerate_nb.runtime.world.mesh import Mesh
from tests.big_models.models import Deep
from tests.ranks import run_on_ranks
from tests.runtime.strategies.tiny_llama import batches, llama

pytest.importorskip("transformers")


def held(degrees: dict[str, int]) -> tuple[int, int, int]:
    """The bytes of weights, gradients and optimizer states that this rank has in memory after a step."""
    config = ParallelismConfig(**{f"{axis}_size": degree for axis, degree in degrees.items()})
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    replica, replicas = accelerator.strategy.data_replicas
    batch = batches()[0][replica::replicas]
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
    optimizer.step()
    tensors = [weight for weight in (*model.parameters(), *model.buffers()) if not weight.is_meta]
    states = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    weights, grads, remembered = (
        sum(local(tensor).nbytes for tensor in found) for found in (tensors, gradients, states)
    )
    return weights, grads, remembered


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_shard": 2},
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp_shard": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda degrees: " x ".join(degrees),
)
def test_each_rank_holds_what_was_estimated(degrees: dict[str, int]) -> None:
    mesh = Mesh(**degrees)
    found = run_on_ranks(held, mesh.size, degrees)
    estimate = on_mesh(of_module(llama(), "here"), "float32", "adamw", mesh)
    for rank, (weights, gradients, remembered) in enumerate(found):
        stage = estimate.stages[mesh.coordinates(rank).get("pp", 0)]
        assert (stage.weights, stage.gradients, stage.optimizer) == (weights, gradients, remembered), rank


def test_the_smallest_mesh_fits_and_half_of_it_does_not() -> None:
    outline = of_module(llama(), "here")
    alone = on_mesh(outline, "mixed", "adamw", Mesh())
    assert smallest_mesh(outline, "mixed", "adamw", 2 * alone.largest.total) == alone
    memory = alone.largest.total // 2
    found = smallest_mesh(outline, "mixed", "adamw", memory)
    assert found is not None
    assert found.mesh.size > 1
    assert found.largest.total <= 0.8 * memory
    assert on_mesh(outline, "mixed", "adamw", Mesh(dp_shard=found.mesh.size // 2)).largest.total > 0.8 * memory
    assert smallest_mesh(outline, "mixed", "adamw", 100) is None


def test_what_can_not_be_estimated_is_named() -> None:
    with pytest.raises(ConfigurationError, match="here has no plan by which tp would split it"):
        on_mesh(of_module(Deep(), "here"), "mixed", "adamw", Mesh(tp=2))
    with pytest.raises(ConfigurationError, match=r"on 3 stages .* but the model has 2 layers"):
        on_mesh(of_module(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "here"), "mixed", "adamw", Mesh(pp=3))
