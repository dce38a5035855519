"""What one process has reaches the others, and calls that don't fit together are errors on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import accelerate_nb.utils.operations as alone
from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError, DataError, OperationError
from tests.peers import Peer, under_both
from tests.ranks import run_on_ranks
from tests.runtime.data.loaders import plain


def any_type() -> list[Any]:
    rank = alone_rank()
    dtypes = [torch.bool, torch.complex64, torch.int16]
    small = [torch.full((2,), rank).to(dtype) for dtype in dtypes]
    large = [torch.full((5000,), rank).to(dtype) for dtype in dtypes]
    return [plain(alone.gather(small)), [len(set(item.tolist())) for item in alone.gather(large)]]


def alone_rank() -> int:
    from accelerate_nb.runtime.world.registry import current_world

    return current_world().rank


def test_numbers_of_any_type_travel() -> None:
    found, unique = run_on_ranks(any_type, 2)[0]
    assert found == [[False, False, True, True], [0j, 0j, 1 + 0j, 1 + 0j], [0, 0, 1, 1]]
    assert unique == [2, 2, 2]


def what_was_given(rows: int) -> list[Any]:
    rank = alone_rank()
    mine = torch.full((rows,), float(rank))
    received = alone.broadcast(mine)
    reduced = alone.reduce(mine, "sum")
    received += 1
    reduced += 1
    return [mine.unique().tolist(), received.unique().tolist(), reduced.unique().tolist()]


@pytest.mark.parametrize("rows", [2, 5000])
def test_what_was_given_is_left_alone(rows: int) -> None:
    assert run_on_ranks(what_was_given, 2, rows) == [[[0.0], [1.0], [2.0]], [[1.0], [1.0], [2.0]]]


def gradients(peer: Peer) -> list[Any]:
    accelerator = peer.Accelerator()
    found = []
    for reduction in ("sum", "mean", "max"):
        for rows in (1, 5000):
            weight = torch.full((rows,), 1.0 + accelerator.process_index, requires_grad=True)
            reduced = peer.door("utils").reduce(weight * 2, reduction)
            reduced.sum().backward()
            assert weight.grad is not None
            found.append([reduced[0].item(), weight.grad[-1].item()])
    return [*found, accelerator.gather(weight).requires_grad]


def test_a_backward_reaches_this_processs_own_part_as_accelerates_does() -> None:
    both = under_both(gradients, 2)
    assert both.ours == both.theirs
    assert both.ours[0][2:4] == [[3.0, 1.0]] * 2


def objects() -> list[Any]:
    rank = alone_rank()
    return [
        alone.gather_object({"loss": rank}),
        alone.gather_object("text"),
        alone.gather_object([]),
        alone.gather_object(torch.ones(1) * rank)[1].item(),
    ]


def test_an_object_that_is_no_list_is_one_element_a_process() -> None:
    assert run_on_ranks(objects, 2) == [[[{"loss": 0}, {"loss": 1}], ["text", "text"], [], 1.0]] * 2


def mismatch(kind: str) -> str:
    rank = alone_rank()
    calls = {
        "shape": lambda: alone.gather(torch.ones(4 - rank, 3)),
        "large shape": lambda: alone.gather(torch.ones(4 - rank, 3000)),
        "type": lambda: alone.gather(torch.ones(2, dtype=torch.float64 if rank else torch.float32)),
        "keys": lambda: alone.gather({"a": torch.ones(1), "b": torch.ones(1)} if rank else {"b": torch.ones(1)}),
        "other call": lambda: alone.gather(torch.ones(1)) if rank else alone.reduce(torch.ones(1)),
        "other reduction": lambda: alone.reduce(torch.ones(1), "sum" if rank else "mean"),
        "not a tensor": lambda: alone.gather(["text" if rank else torch.ones(1)]),
        "objects": lambda: alone.gather_object([lambda: 0] if rank else [0]),
        "dimensions": lambda: alone.pad_across_processes(torch.ones([1] * (rank + 1))),
    }
    try:
        calls[kind]()
    except Exception as error:
        alone.gather(torch.ones(1))  # who has raised can go on with the others
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("shape", ["float32[4, 3]", "float32[3, 3]"]),
        ("large shape", ["float32[4, 3000]", "float32[3, 3000]"]),
        ("type", ["float32[2]", "float64[2]"]),
        ("keys", ["{'b': float32[1]}", "{'a': float32[1], 'b': float32[1]}"]),
        ("other call", ["reduce mean(float32[1])", "gather(float32[1])"]),
        ("other reduction", ["reduce mean(", "reduce sum("]),
        ("not a tensor", ["[float32[1]]", "[str]"]),
        ("dimensions", ["tensor of 1 dim", "tensor of 2 dim"]),
    ],
)
def test_calls_that_do_not_fit_together_are_errors_on_all(kind: str, calls: list[str]) -> None:
    for message in run_on_ranks(mismatch, 2, kind):
        assert message.startswith("OperationError")
        for rank, part in enumerate(calls):
            assert f"rank {rank}: " in message
            assert part in message


def test_an_object_that_cannot_be_pickled_is_an_error_on_all() -> None:
    first, second = run_on_ranks(mismatch, 2, "objects")
    assert "a list that can't be pickled" in first
    assert "pickle" in second
    assert not second.startswith("OperationError")


def errors_of_no_tensors() -> list[str]:
    accelerator, tensor = Accelerator(), torch.ones(2)
    calls: list[Callable[[], Any]] = [
        lambda: alone.gather("text"),
        lambda: alone.gather((tensor, 1)),
        lambda: accelerator.reduce({"loss": [tensor, 1.5]}),
        lambda: alone.broadcast([None]),
        lambda: accelerator.pad_across_processes(1.5),
        lambda: alone.pad_input_tensors((tensor, 1), 2, 2),
        lambda: alone.broadcast_object_list(5),  # type: ignore[arg-type]  # what the call is to refuse
    ]
    found = []
    for call in calls:
        with pytest.raises(DataError) as caught:
            call()
        found.append(str(caught.value).partition(", and ")[0])
    return found


def test_what_is_no_tensor_is_an_error_with_the_call_and_its_position() -> None:
    expected = [
        "gather was given a str",
        "gather was given an int (1) at [1]",
        "reduce was given a float (1.5) at ['loss'][1]",
        "broadcast was given a NoneType at [0]",
        "pad_across_processes was given a float (1.5)",
        "pad_input_tensors was given an int (1) at [1]",
        "broadcast_object_list was given a int",
    ]
    assert run_on_ranks(errors_of_no_tensors, 2) == [expected] * 2


def copies(rows: int) -> list[Any]:
    mine = torch.arange(rows, dtype=torch.int16) if alone_rank() == 1 else None
    copied = alone.copy_tensor_to_devices(mine)
    empty = alone.copy_tensor_to_devices(None if mine is None else mine[:0])
    try:
        alone.copy_tensor_to_devices()
    except OperationError as error:
        return [copied.sum().item(), str(copied.dtype), empty.shape[0], "0 processes" in str(error)]
    return []


@pytest.mark.parametrize("rows", [3, 9000])
def test_a_tensor_of_one_process_is_copied_to_all(rows: int) -> None:
    assert run_on_ranks(copies, 2, rows) == [[sum(range(rows)), "torch.int16", 0, True]] * 2


def test_one_process_keeps_what_it_has() -> None:
    tensor = torch.ones(2)
    assert alone.gather(tensor) is tensor
    assert alone.broadcast(tensor) is tensor
    assert alone.gather_object({"a": 1}) == {"a": 1}
    assert alone.reduce(tensor) is not tensor
    assert alone.copy_tensor_to_devices(tensor).equal(tensor)
    assert alone.pad_across_processes(tensor) is tensor
    with pytest.raises(DataError, match="reduce was given a str at"):
        alone.reduce(["text"])
    with pytest.raises(ConfigurationError, match=r"reduction='avg'.* sum, mean, max, min, none"):
        alone.reduce(tensor, "avg")


def test_a_nested_tensor_is_left_as_it_is() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.warns(alone.CannotPadNestedTensorWarning):
        assert alone.pad_across_processes(nested) is nested
