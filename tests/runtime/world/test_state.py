"""What a process does in step with the others, or alone in their place."""

import os
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from accelerate_nb import Accelerator, PartialState
from accelerate_nb.errors import ConfigurationError, StateError
from accelerate_nb.logging import get_logger
from accelerate_nb.runtime.world.registry import is_joined
from accelerate_nb.state import AcceleratorState, GradientState, is_initialized
from tests.ranks import ONE_OR_TWO, run_on_ranks
from tests.runtime.data.loaders import plain


def who_runs() -> list[str]:
    accelerator = Accelerator()
    ran = []
    accelerator.on_main_process(lambda: ran.append("main"))()
    accelerator.on_local_main_process(lambda: ran.append("local main"))()
    accelerator.on_last_process(lambda: ran.append("last"))()
    accelerator.on_process(lambda: ran.append("second"), process_index=1)()
    accelerator.on_process(process_index=0)(lambda: ran.append("first"))()
    accelerator.on_local_process(lambda: ran.append("second here"), local_process_index=1)()
    return ran


def test_a_decorated_function_runs_where_it_should() -> None:
    assert run_on_ranks(who_runs, 2) == [["main", "local main", "first"], ["last", "second", "second here"]]


def split(inputs: Any, padded: bool) -> Any:
    given = repr(inputs)
    with PartialState().split_between_processes(inputs, apply_padding=padded) as mine:
        assert repr(inputs) == given
        return plain(mine) if "tensor" in given else mine


@pytest.mark.parametrize(
    ("inputs", "padded", "parts"),
    [
        (["a", "b", "c"], False, [["a", "b"], ["c"]]),
        (["a", "b", "c"], True, [["a", "b"], ["c", "c"]]),
        (("a", "b", "c"), True, [("a", "b"), ("c", "c")]),
        (torch.arange(3), True, [[0, 1], [2, 2]]),
        ({"x": torch.arange(3)}, True, [{"x": [0, 1]}, {"x": [2, 2]}]),
        ({"x": [1, 2, 3], "y": "abc"}, False, [{"x": [1, 2], "y": "abc"}, {"x": [3], "y": "abc"}]),
        (["a"], False, [["a"], []]),
        (["a"], True, [["a"], ["a"]]),
    ],
)
def test_a_collection_is_split_as_evenly_as_it_goes_and_stays_as_it_was(
    inputs: Any, padded: bool, parts: list[Any]
) -> None:
    assert run_on_ranks(split, 2, inputs, padded) == parts


EMPTY = [[], (), {}, {"p": [], "q": ()}, torch.zeros(0, 3), {"x": torch.zeros(0)}, np.zeros(0), "", {"a": {"b": []}}]


def split_empty() -> list[Any]:
    found: list[Any] = []
    for inputs, padded in product(EMPTY, [False, True]):
        with PartialState().split_between_processes(inputs, apply_padding=padded) as mine:
            found.append(mine)
    return found


def test_nothing_is_split_into_nothing() -> None:
    for found in run_on_ranks(split_empty, 2):
        assert repr(found) == repr([item for item in EMPTY for _ in range(2)])


def states_after_the_end() -> list[Any]:
    first = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    before = [AcceleratorState().mixed_precision, GradientState().num_steps]
    first.end_training()
    assert (is_initialized(), is_joined(), dist.is_initialized()) == (True, False, False)
    before.append(AcceleratorState().mixed_precision)  # what it knew it still knows
    second = Accelerator()
    first.end_training()  # again
    assert is_joined()
    total = second.reduce(torch.ones(1)).item()
    after = [AcceleratorState().mixed_precision, second.gradient_accumulation_steps, second.num_processes]
    second.end_training()
    return [*before, *after, total]


@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_after_the_end_a_new_accelerator_begins_anew(size: int) -> None:
    assert run_on_ranks(states_after_the_end, size) == [["bf16", 4, "bf16", "no", 1, size, float(size)]] * size


def goes_on_after_the_end(folder: Path) -> list[Any]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.end_training()
    if PartialState().is_main_process:
        get_logger("of a test").info("done")
        accelerator.save(accelerator.unwrap_model(model).state_dict(), folder / "weights.bin")
    assert not dist.is_initialized()  # what one process does alone waits for no other
    accelerator.wait_for_everyone()
    with accelerator.main_process_first():
        found = [path.name for path in folder.iterdir()]
    gathered = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    accelerator.save_state(str(folder / "state"))
    accelerator.end_training()
    assert not dist.is_initialized()
    return [found, gathered, (folder / "state").is_dir(), Accelerator(cpu=True).num_processes]


@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_after_the_end_an_accelerator_saves_logs_waits_and_gathers(tmp_path: Path, size: int) -> None:
    found = run_on_ranks(goes_on_after_the_end, size, tmp_path)
    assert found == [[["weights.bin"], [*range(size)], True, size]] * size


def test_a_loop_that_runs_again_after_the_end_accumulates_as_before() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters()), torch.utils.data.DataLoader(torch.ones(8, 1))
    )
    steps = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
                steps.append(accelerator.sync_gradients)
        accelerator.end_training()
    assert steps == [False, False, False, True] * 4


def state_resets() -> None:
    with pytest.raises(StateError, match="before there was an Accelerator"):
        AcceleratorState()
    first = PartialState(cpu=True)
    first.noted = "by the first"  # type: ignore[attr-defined]  # people keep things there
    assert PartialState().__dict__ is first.__dict__
    assert PartialState().noted == "by the first"  # type: ignore[attr-defined]  # the same
    first._reset_state()
    with pytest.raises(AttributeError, match=r"`PartialState._reset_state\(\)` was called"):
        first.num_processes  # noqa: B018 - what is tested
    state = Accelerator().state
    AcceleratorState._reset_state(True)
    with pytest.raises(AttributeError, match=r"`AcceleratorState._reset_state\(\)` was called"):
        state.mixed_precision  # noqa: B018 - what is tested


def test_the_first_state_shares_with_the_next_ones_and_one_without_an_accelerator_reports_what_to_do() -> None:
    run_on_ranks(state_resets, 1)


def test_what_cannot_be_is_refused_at_once_and_the_environment_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"mixed_precision": "bf15"}, "'no', 'fp8', 'fp16', 'bf16'"),
        ({"fsdp_plugin": object()}, "must be a FullyShardedDataParallelPlugin"),
        ({"kwargs_handlers": [object()]}, "Unsupported kwargs handler passed"),
        ({"gradient_accumulation_steps": "four"}, "gradient_accumulation_steps='four' was given"),
        ({"gradient_accumulation_steps": 0}, "Pass one that is at least 1"),
        ({"project_config": {"total_limit": 2}}, "should be a ProjectConfiguration"),
        ({"dataloader_config": {"split_batches": True}}, "should be a DataLoaderConfiguration"),
    ]
    for options, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            Accelerator(**options)
    texts: Any = {"gradient_accumulation_steps": "2"}  # as Accelerate has it
    assert Accelerator(**texts).gradient_accumulation_steps == 2
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")
    accelerator = Accelerator()
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 3)
    assert accelerator.device == torch.device("cpu")
    accelerator.end_training()


def states_with_arguments_of_the_group() -> list[Any]:
    size = int(os.environ["WORLD_SIZE"])
    others = [("rank", size), ("world_size", size + 1)]
    for name, number in others:
        with pytest.raises(ConfigurationError, match=f"{name}={number} was requested, but this is rank . of {size}"):
            PartialState(cpu=True, **{name: number})
    with pytest.raises(ConfigurationError, match=r"ranks can't be given .* rank, world_size, pg_options"):
        PartialState(cpu=True, ranks=1)
    state = PartialState(cpu=True, rank=int(os.environ["RANK"]), world_size=size, pg_options=None)
    return [state.process_index, state.num_processes]


@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_a_state_takes_the_arguments_of_the_process_group_and_checks_its_numbers(size: int) -> None:
    assert run_on_ranks(states_with_arguments_of_the_group, size) == [[rank, size] for rank in range(size)]


def assigned() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    before = accelerator.state.distributed_type
    accelerator.state.distributed_type = "FSDP"
    during = [accelerator.state.distributed_type.value, AcceleratorState().distributed_type.value]
    accelerator.state.distributed_type = before
    return [*during, accelerator.state.distributed_type == accelerator.distributed_type == before]


def test_the_way_of_training_can_be_assigned_to_the_state() -> None:
    assert run_on_ranks(assigned, 2) == [["FSDP", "FSDP", True]] * 2
