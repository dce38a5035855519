"""Every strategy ends a training in the weights of one process that has the same samples."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_nb import Accelerator, ConfigurationError, ParallelismConfig, Strategy
from accelerate_nb.errors import NotYetError
from tests.ranks import run_on_ranks
from tests.runtime.strategies import tiny_llama
from tests.runtime.strategies.contract import (
    ACCUMULATION,
    ADAMW_ROUNDING,
    CASES,
    MICRO_STEPS,
    OVERFLOWS,
    ROUNDING,
    Deletion,
    StrategyCase,
    by_hand,
    by_mesh,
    difference,
    parameters_of,
    train,
    trained,
)


@pytest.mark.parametrize("case", [parameters_of(case) for case in CASES])
def test_a_training_ends_in_the_weights_of_one_process(case: StrategyCase, tmp_path: Path) -> None:
    assert difference(run_on_ranks(trained, case.ranks, str(tmp_path / "checkpoint"), case.arguments)) < ROUNDING["no"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [parameters_of(case) for case in CASES])
def test_a_training_with_adamw_ends_in_the_weights_of_one_process(case: StrategyCase, tmp_path: Path) -> None:
    found = run_on_ranks(trained, case.ranks, str(tmp_path / "checkpoint"), case.arguments, "no", True)
    assert difference(found, adamw=True) < ADAMW_ROUNDING


@pytest.mark.parametrize(
    ("case", "deletion"), [parameters_of(case, deletion) for case in CASES for deletion in case.deletions]
)
def test_without_a_reduction_it_ends_in_other_weights(case: StrategyCase, deletion: Deletion, tmp_path: Path) -> None:
    precision = deletion.precision
    found = run_on_ranks(trained, case.ranks, str(tmp_path / "checkpoint"), deletion.arguments, precision)
    assert difference(found, precision) > 100 * ROUNDING[precision]


@pytest.mark.parametrize("case", [parameters_of(case) for case in CASES])
def test_all_ranks_leave_out_a_step_in_which_one_overflows(case: StrategyCase, tmp_path: Path) -> None:
    found = run_on_ranks(trained, case.ranks, str(tmp_path / "checkpoint"), case.arguments, "fp16")
    assert [outcome.skipped for outcome in found] == [OVERFLOWS] * case.ranks
    assert {outcome.scale for outcome in found} == {by_hand("fp16").scale}
    assert difference(found, "fp16") < ROUNDING["fp16"]


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2)])
def test_a_checkpoint_is_loaded_by_another_number_of_ranks(saved_by: int, loaded_by: int, tmp_path: Path) -> None:
    folder, whole_windows = str(tmp_path / "checkpoint"), 2 * ACCUMULATION
    run_on_ranks(train, saved_by, folder, dict, whole_windows)
    found = run_on_ranks(train, loaded_by, folder, dict, MICRO_STEPS - whole_windows, True)
    assert difference(found) < ROUNDING["no"]


ON: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "DDP": (2, {}),
    "FSDP": (2, {"strategy": "fsdp"}),
    "split layers": (2, by_mesh(tp_size=2)),
    "stages": (2, by_mesh(pp_size=2)),
    "pipelines of shards": (4, by_mesh(pp_size=2, dp_shard_size=2)),
}


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        ("split layers", "one process"),
        *(pytest.param("split layers", way, marks=pytest.mark.slow) for way in ("DDP", "FSDP", "split layers")),
        *(
            pytest.param("stages", way, marks=pytest.mark.slow)
            for way in ("one process", "FSDP", "split layers", "pipelines of shards")
        ),
        pytest.param("one process", "stages", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_parts_is_loaded_in_every_way(saved_by: str, loaded_by: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks, arguments = ON[saved_by]
    found = run_on_ranks(tiny_llama.trained, ranks, tiny_llama.llama, arguments, folder)[0]
    ranks, arguments = ON[loaded_by]
    state = run_on_ranks(tiny_llama.loaded, ranks, folder, arguments)[0]
    torch.testing.assert_close(state, found["state"], rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [3, "zero", int, Accelerator])
def test_what_is_no_strategy_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"a class below accelerate_nb\.Strategy"):
        Accelerator(cpu=True, strategy=wrong)


def spreads_otherwise() -> None:
    with pytest.raises(NotYetError, match="dp_shard=2 was requested, but DDP spreads"):
        Accelerator(cpu=True, strategy="ddp", parallelism_config=ParallelismConfig(dp_shard_size=2))
    message = "sp_size=2 was requested, but DeepSpeed alone splits sequences so, and the training is by DDP"
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2))


def spreads_as_usual() -> tuple[str, int]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig())
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    return type(model).__name__, accelerator.num_processes


def test_a_configuration_without_degrees_requests_none() -> None:
    assert run_on_ranks(spreads_as_usual, 2) == [("DistributedDataParallel", 2)] * 2


def test_a_degree_that_no_strategy_has_is_refused_by_name() -> None:
    run_on_ranks(spreads_otherwise, 2)


class Doubling(Strategy):
    """A strategy that replaces a model's weights by others when it wraps the model."""

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(weight.detach() * 2))
        return model


@pytest.mark.parametrize("order", ["together", "optimizer first", "optimizer later"])
def test_optimizers_follow_weights_that_are_replaced(order: str) -> None:
    accelerator = Accelerator(cpu=True, strategy=Doubling)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 1.0}, {"params": [model.bias]}], lr=0.5)
    before = model.weight.detach().clone()
    if order == "together":
        optimizer, model = accelerator.prepare(optimizer, model)
    elif order == "optimizer first":
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    else:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    assert [
        group["params"][0] is weight for group, weight in zip(optimizer.param_groups, model.parameters(), strict=True)
    ]
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), 2 * before - 1)
    accelerator.end_training()
