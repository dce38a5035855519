"""What one process has reaches the others, and calls that don't fit together are errors on all of them."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import accelerate_nb.utils.operations as alone
from accelerate_nb import Accelerator, PartialState
from accelerate_nb.errors import ConfigurationError, DataError
from accelerate_nb.runtime.world.registry import current_world
from tests.peers import Peer, under_both
from tests.ranks import run_on_ranks
from tests.runtime.data.loaders import plain
from tests.runtime.operations.test_transfer import outcome


def any_type() -> list[Any]:
    """Numbers that are gathered, and those of reductions by their names."""
    rank = current_world().rank
    mine = torch.tensor([rank + 1])
    reduced = [alone.reduce(mine, reduction).tolist() for reduction in ("none", "min", "max", "sum", "mean")]
    dtypes = [torch.bool, torch.complex64, torch.int16]
    small = [torch.full((2,), rank).to(dtype) for dtype in dtypes]
    large = [torch.full((5000,), rank).to(dtype) for dtype in dtypes]
    return [plain(alone.gather(small)), [len(set(item.tolist())) for item in alone.gather(large)], reduced]


def test_numbers_of_any_type_travel_and_a_reduction_does_what_its_name_promises() -> None:
    ranks = run_on_ranks(any_type, 2)
    assert [reduced for *_, reduced in ranks] == [[[rank + 1], [1], [2], [3], [1.5]] for rank in range(2)]
    found, unique, _ = ranks[0]
    assert found == [[False, False, True, True], [0j, 0j, 1 + 0j, 1 + 0j], [0, 0, 1, 1]]
    assert unique == [2, 2, 2]


def what_was_given(rows: int) -> list[Any]:
    rank = current_world().rank
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
    rank = current_world().rank
    found = [alone.gather_object(given) for given in ({"loss": rank}, "text", [])]
    found.append(alone.gather_object(torch.ones(1) * rank)[1].item())
    misfit = outcome(lambda: alone.gather_object([lambda: 0] if rank else [0]))
    alone.gather(torch.ones(1))  # who has raised can go on with the others
    return [found, misfit]


def test_an_object_that_is_no_list_is_one_element_a_process_and_one_that_cannot_be_pickled_an_error_on_all() -> None:
    (found, first), (others, second) = run_on_ranks(objects, 2)
    assert found == others == [[{"loss": 0}, {"loss": 1}], ["text", "text"], [], 1.0]
    assert "a list that can't be pickled" in first
    assert "local object 'objects.<locals>" in second
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


SHAPES = [(2, 0, 3), (), (70000,), (1, 2)]


def copied() -> list[Any]:
    found = []
    for shape in SHAPES:
        mine = torch.full(shape, 7, dtype=torch.complex64) if current_world().rank else None
        copy = alone.copy_tensor_to_devices(mine)
        found.append((tuple(copy.shape), copy.dtype, copy.flatten()[:1].tolist()))
    with pytest.raises(alone.DistributedOperationException, match="0 processes"):  # Accelerate's name
        alone.copy_tensor_to_devices()
    return found


def test_a_tensor_is_copied_to_all_with_its_dimensions_of_zero() -> None:
    expected = [(shape, torch.complex64, [7] * (0 not in shape)) for shape in SHAPES]
    assert run_on_ranks(copied, 2) == [expected] * 2


def verified(spelling: str) -> list[str]:
    os.environ["ACCELERATE_DEBUG_MODE"] = spelling
    state = PartialState(cpu=True)

    @alone.verify_operation
    def total(tensor: torch.Tensor) -> float:
        return tensor.sum().item()

    @alone.chained_operation
    def outer(tensor: torch.Tensor) -> float:
        return total(tensor=tensor)

    uneven = torch.ones(state.process_index + 1)
    return [str(state.debug), outcome(lambda: outer(uneven)), str(total(torch.ones(2)))]


@pytest.mark.parametrize("spelling", ["1", "true", "yes", "0"])
def test_debug_mode_alone_checks_ones_own_operations_however_it_is_spelled(spelling: str) -> None:
    for rank, (debug, message, total) in enumerate(run_on_ranks(verified, 2, spelling)):
        assert (debug, total) == (str(spelling != "0"), "2.0")
        if spelling == "0":
            assert message == f"returned {rank + 1.0}"
            continue
        assert "verified.<locals>.outer could not be done" in message
        for other in (1, 2):
            called = f"tests.runtime.operations.test_collective.verified.<locals>.total(float32[{other}])"
            assert f"rank {other - 1}: {called}" in message


def padded_by_row() -> list[Any]:
    rows, row = torch.ones(current_world().rank + 1, 2), torch.tensor([5.0, 6.0])
    return [alone.pad_across_processes(rows, pad_index=row, pad_first=first).tolist() for first in (False, True)]


def test_a_tensor_is_padded_with_a_row_as_with_a_number() -> None:
    one, fill = [1.0, 1.0], [5.0, 6.0]
    assert run_on_ranks(padded_by_row, 2) == [[[one, fill], [fill, one]], [[one, one]] * 2]


def test_one_process_keeps_what_it_has() -> None:
    tensor = torch.ones(2)
    assert alone.gather(tensor) is tensor
    assert alone.broadcast(tensor) is tensor
    assert alone.gather_object({"a": 1}) == {"a": 1}
    assert alone.reduce(tensor) is not tensor
    assert alone.copy_tensor_to_devices(tensor).equal(tensor)
    assert alone.pad_across_processes(tensor) is tensor
    Accelerator(cpu=True)
    weight = torch.nn.Parameter(tensor)
    with alone.GatheredParameters([weight], modifier_rank=0):
        assert weight.numel() == 2  # nobody parts it
    with pytest.raises(DataError, match="reduce was given a str at"):
        alone.reduce(["text"])
    with pytest.raises(ConfigurationError, match=r"reduction='avg'.* sum, mean, max, min, none"):
        alone.reduce(tensor, "avg")
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.warns(alone.CannotPadNestedTensorWarning):
        assert alone.pad_across_processes(nested) is nested
