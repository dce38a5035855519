"""A mesh's degrees, coordinates and errors; its order is that of torch's own mesh."""

from __future__ import annotations

import itertools

import pytest

from accelerate_nb import ConfigurationError, ParallelismConfig
from accelerate_nb.runtime.world.mesh import Mesh
from tests.ranks import run_on_ranks

SIZES = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}


def coordinates_of_torch() -> dict[str, int]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    mesh = ParallelismConfig(**{f"{axis}_size": size for axis, size in SIZES.items()}).get_device_mesh("cpu")
    assert mesh is not None
    found = {axis: mesh.get_local_rank(axis) for axis in SIZES}
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_coordinates_are_those_of_torch_s_mesh() -> None:
    mesh = ParallelismConfig(**{f"{axis}_size": size for axis, size in SIZES.items()}).mesh
    assert [mesh.coordinates(rank) for rank in range(8)] == run_on_ranks(coordinates_of_torch, 8)


def test_ranks_of_one_copy_have_the_same_samples() -> None:
    mesh = Mesh(dp_replicate=2, cp=2, tp=2)
    assert [mesh.data_replica(rank) for rank in range(8)] == [(0, 2)] * 4 + [(1, 2)] * 4
    assert mesh.ranks_along(5, "tp") == (4, 5)
    assert mesh.ranks_along(5, "dp_replicate") == (1, 5)
    assert mesh.ranks_along(5, "cp", "tp") == (4, 5, 6, 7)
    assert Mesh(dp_shard=4).data_replica(3) == (3, 4)


@pytest.mark.parametrize("degrees", list(itertools.product((1, 2, 3), repeat=3)), ids=str)
def test_every_rank_has_coordinates_of_its_own(degrees: tuple[int, int, int]) -> None:
    mesh = Mesh(**dict(zip(("pp", "dp_shard", "tp"), degrees, strict=True)))
    found = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.size)]
    assert sorted(set(found)) == found


@pytest.mark.parametrize(
    ("mesh", "size", "message"),
    [
        (Mesh(dp_shard=2, tp=2), 8, "one of these fits: dp_shard=4; tp=4"),
        (Mesh(dp_shard=2, tp=3), 8, "one of these fits: tp=4"),
        (Mesh(dp_shard=3, tp=5), 8, "Launch 15 ranks"),
        (Mesh(), 8, "one of these fits: dp_replicate=8"),
    ],
    ids=str,
)
def test_degrees_that_do_not_fit_are_an_error_with_those_that_do(mesh: Mesh, size: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        mesh.checked(size)


def test_a_degree_is_at_least_one() -> None:
    with pytest.raises(ConfigurationError, match=r"pp=-1, tp=0 was requested"):
        Mesh(tp=0, pp=-1)
