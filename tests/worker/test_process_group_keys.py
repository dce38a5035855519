"""A default process group can be made again and again, by whatever library, wherever this package started the ranks."""

import os
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from accelerate_nb import Accelerator, notebook_launcher
from accelerate_nb.config.run_config import resolve
from accelerate_nb.launching.session import Session

TIMES = 20
TWO = {"num_processes": 2, "cpu": True, "timeout": 120.0}


def summed() -> float:
    """A sum over all ranks."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def plain() -> float:
    dist.init_process_group("gloo")
    total = summed()
    dist.destroy_process_group()
    return total


def through_accelerate() -> float:
    from accelerate import Accelerator as Theirs
    from accelerate.state import AcceleratorState, GradientState

    accelerator = Theirs(cpu=True)
    total = summed()
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return total


def at_a_port_of_its_own() -> float:
    """As tutorials have it; torchrun's ranks would all wait there for a store that none of them hosts."""
    os.environ["MASTER_ADDR"], port = "localhost", os.environ["MASTER_PORT"]
    os.environ["MASTER_PORT"] = str(int(port) % 10000 + 10000)
    total = plain()
    os.environ["MASTER_PORT"] = port
    return total


def ours() -> float:
    accelerator = Accelerator()
    total = summed()
    accelerator.end_training()
    return total


def again_and_again(times: int, *ways: Callable[[], float]) -> list[float]:
    return [ways[number % len(ways)]() for number in range(times)]


def test_groups_are_made_again_and_again_in_a_launched_function():
    ways = (plain, at_a_port_of_its_own, plain, ours, through_accelerate)
    assert notebook_launcher(again_and_again, (TIMES, *ways), **TWO) == [2.0] * TIMES


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_groups_are_made_again_in_workers_that_no_supervisor_forked(start_method):
    assert notebook_launcher(again_and_again, (10, plain), start_method=start_method, **TWO) == [2.0] * 10


@pytest.mark.slow
def test_groups_are_made_again_and_again_in_the_cells_of_a_session_also_where_one_rank_alone_had_made_one(tmp_path):
    with closing(Session.start(resolve({**TWO, "folder": str(tmp_path)}, {}))) as session:
        session.run("import torch.distributed as dist\naccelerator.end_training()").wait()
        for way in (plain, through_accelerate) * (TIMES // 2):
            assert [end.value for end in session.call(way).wait()] == [2.0] * 2
        session.run("dist.init_process_group('gloo')", ranks=[1], timeout=1).wait_until_over(None)
        # groups are made anew before it
        session.run("dist.destroy_process_group()").wait()
        for _ in range(3):
            assert [end.value for end in session.call(plain).wait()] == [2.0] * 2


def test_groups_are_made_again_in_each_call_of_a_launcher_inside_of_a_launched_function():
    assert notebook_launcher(inside, **TWO) == [[2.0] * 4] * 2


def inside() -> list[list[float]]:
    """Two calls, each at a meeting place of its own."""
    return [notebook_launcher(again_and_again, (4, plain, ours)) for _ in range(2)]
