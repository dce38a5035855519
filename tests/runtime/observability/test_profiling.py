"""A block that is profiled tells what happened in it, one trace a process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.observability.profiling import ProfileKwargs
from tests.peers import Peer, under_both
from tests.ranks import ONE_OR_TWO


def profiled(peer: Peer, folder: str) -> list[Any]:
    kwargs_class = peer.door("utils").ProfileKwargs
    traces = Path(folder, peer.name)
    ready: list[int] = []
    schedule = {"wait": 1, "warmup": 1, "active": 1, "repeat": 2, "skip_first": 1}
    hear = lambda trace: ready.append(trace.step_num)  # noqa: E731
    of_accelerator = kwargs_class(activities=["cpu"], schedule_option=schedule, on_trace_ready=hear)
    accelerator = peer.Accelerator(cpu=True, kwargs_handlers=[of_accelerator])
    with accelerator.profile() as profiler:
        for _ in range(8):
            torch.ones(3, 3) @ torch.ones(3, 3)
            profiler.step()
    of_block = kwargs_class(record_shapes=True, with_flops=True, output_trace_dir=str(traces))
    with accelerator.profile(of_block) as profiler:
        torch.ones(3, 4) @ torch.ones(4, 5)
    files = sorted(path.name for path in traces.iterdir())
    names = {event.get("name") for event in json.loads((traces / files[-1]).read_text())["traceEvents"]}
    (product,) = [event for event in profiler.key_averages(group_by_input_shape=True) if event.key == "aten::mm"]
    options = sorted(of_accelerator.to_kwargs())
    return [ready, files, "aten::mm" in names, product.input_shapes, product.flops, options]


@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_profiles_hold_what_accelerates_hold(size: int, tmp_path: Path) -> None:
    both = under_both(profiled, size, str(tmp_path))
    assert both.ours == both.theirs
    assert both.ours[0][1] == [f"profile_{rank}.json" for rank in range(size)]
    assert both.ours[0][2]


def test_a_block_that_fails_writes_no_trace_and_the_error_of_an_unknown_activity_lists_the_known_ones(
    tmp_path: Path,
) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(KeyError), accelerator.profile(ProfileKwargs(output_trace_dir=str(tmp_path / "traces"))):
        raise KeyError
    assert not (tmp_path / "traces").exists()
    accelerator.end_training()
    with pytest.raises(ConfigurationError, match=r"Invalid profiler activity: 'gpu'.*'cpu', 'cuda'"):
        ProfileKwargs(activities=["gpu"]).build()
    ProfileKwargs(activities=["cpu", "cuda"]).build()
