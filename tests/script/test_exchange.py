"""What `push`, `pull` and `run` give to whom: the same as their lines in a notebook."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from accelerate_nb.errors import ConfigurationError, OperationError
from accelerate_nb.runtime.accelerator.accelerator import Accelerator
from accelerate_nb.script.exchange import pull, pull_from, push, run
from accelerate_nb.script.serializer import pack, unpack
from tests.ranks import run_on_ranks


def on_each_rank() -> dict[str, Any]:
    """One start of processes serves all: what each rank was given."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    rank = Accelerator().process_index
    mine = torch.full((2, 3), float(rank), dtype=torch.bfloat16)
    found: dict[str, Any] = {}
    found["pushed"] = push(mine + 5, {"rank": rank})
    found["one"] = push(f"of {rank}")
    found["pulled"] = pull(mine)
    found["of one"] = pull(rank, str(rank), rank=1)
    found["every"] = pull(rank, mine, every=True)
    found["copied"] = pull(mine) is not mine
    # rank 0 has no such variable
    found["from"] = pull_from(1, lambda: {1: "there"}[rank])
    found["called"] = run(lambda value: [*value, rank], ["asked"])
    weight = torch.ones(2, requires_grad=True)
    found["grad"] = pull(weight * 2).requires_grad
    found["model"] = type(pull(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)))).__name__
    found["errors"] = [error_of(lambda: pull(rank, rank=2)), error_of(lambda: pull(item for item in ()))]
    found["missing"] = error_of(lambda: pull_from(1, lambda: {}[rank]))
    # after all of that the ranks still hear each other
    found["after"] = pull(rank, every=True)
    return found


def error_of(call: Any) -> tuple[str, str]:
    """The error of a call."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What two ranks found."""
    return run_on_ranks(on_each_rank)


def test_a_push_gives_the_first_rank_s_values_to_all(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        tensor, other = found["pushed"]
        assert torch.equal(tensor, torch.full((2, 3), 5, dtype=torch.bfloat16))
        assert tensor.dtype == torch.bfloat16
        assert other == {"rank": 0}
        assert found["one"] == "of 0"


def test_a_pull_gives_one_rank_s_values_to_all(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert torch.equal(found["pulled"], torch.zeros((2, 3), dtype=torch.bfloat16))
        assert found["of one"] == (1, "1")
        assert found["copied"]
        assert found["from"] == "there"


def test_every_rank_s_values_come_as_a_list_in_the_order_of_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        numbers, tensors = found["every"]
        assert numbers == [0, 1]
        assert [tensor[0, 0].item() for tensor in tensors] == [0, 1]


def test_a_call_runs_everywhere_and_gives_what_it_returned_on_the_first(ranks: list[dict[str, Any]]) -> None:
    assert [found["called"] for found in ranks] == [["asked", 0]] * 2


def test_what_is_pulled_has_left_autograd_and_ddp(ranks: list[dict[str, Any]]) -> None:
    assert [found["grad"] for found in ranks] == [False] * 2
    assert [found["model"] for found in ranks] == ["Linear"] * 2


def test_what_can_t_be_sent_is_an_error_on_every_rank_and_the_next_call_works(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        missing_rank, unpicklable = found["errors"]
        assert missing_rank[0] == ConfigurationError.__name__
        assert "rank 2 was requested, but there are 2 processes" in missing_rank[1]
        assert "cannot pickle" in unpicklable[1]
        assert found["after"] == [0, 1]
    assert ranks[0]["errors"][1][0] == "TypeError"
    assert ranks[1]["errors"][1][0] == OperationError.__name__
    assert [found["missing"][0] for found in ranks] == [OperationError.__name__, "KeyError"]


def test_in_one_process_a_push_is_the_value_itself_and_a_pull_is_a_copy_of_it() -> None:
    value = [torch.ones(2), lambda: 3]
    assert push(value) is value
    pulled = pull(value)
    assert torch.equal(pulled[0], value[0])
    assert pulled[0] is not value[0]
    assert pulled[1]() == 3
    assert pull(1, 2, every=True) == ([1], [2])
    with pytest.raises(ConfigurationError, match="Leave one of them out"):
        pull(1, rank=0, every=True)


def test_what_a_called_function_does_to_its_arguments_is_not_seen_where_they_came_from() -> None:
    numbers: list[int] = []
    assert run(lambda values: [*values, values.append(1)], numbers) == [None]
    assert numbers == []


def test_tensors_that_share_memory_share_it_afterwards() -> None:
    whole = torch.arange(4.0)
    first, second = unpack(pack([whole, whole[2:]], detached=False), torch.device("cpu"))
    second += 1
    assert first.tolist() == [0, 1, 3, 4]


def test_classes_of_the_script_go_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    exec("class Config:\n    class Inner: ...\ndef double(x): return 2 * x\nfind = lambda x: x", vars(script))
    value = [script.Config(), script.Config.Inner(), script.double, script.find]
    config, inner, double, find = unpack(pack(value, detached=False), torch.device("cpu"))
    assert type(config) is script.Config
    assert type(inner) is script.Config.Inner
    assert double is script.double
    assert find(3) == 3
