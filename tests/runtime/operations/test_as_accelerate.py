"""Every operation gives what Hugging Face Accelerate's gives, for nests of all kinds of tensors on one, two and three ranks."""

import dataclasses
import os
import warnings
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.utils.operations import TENSOR_TYPE_TO_INT as their_numbers

import accelerate_nb.utils.operations as operations
from accelerate_nb import PartialState
from accelerate_nb.errors import OperationError
from tests.conftest import OF_A_LAUNCHER
from tests.peers import Peer, under_both
from tests.ranks import run_on_ranks
from tests.runtime.data.loaders import typed

Pair = namedtuple("Pair", ["first", "second"])

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.uint8, torch.int8, torch.int32, torch.int64]
# Accelerate over gloo can move these, but not add them up.
ODD = [torch.bool, torch.int16, torch.complex64, torch.complex128]


@dataclasses.dataclass
class Batch:
    """Something that no operation looks into."""

    numbers: torch.Tensor


def drawn(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def nest(rank: int) -> dict[str, Any]:
    return {
        "list": [drawn(rank, 3, 2), (drawn(rank, 3),)],
        "pair": Pair(drawn(rank, 2, dtype=torch.int64), [drawn(rank, 2, 2)]),
        "ordered": OrderedDict(b=drawn(rank, 1), a=drawn(rank, 2)),
        "user": UserDict(one=drawn(rank, 2)),
        "empty": [],
    }


def shapes(rank: int) -> dict[str, torch.Tensor]:
    """One of each kind of tensor."""
    return {
        "no dimensions": torch.tensor(1.5 + rank),
        "nothing in it": torch.empty(0),
        "a dimension of zero": torch.empty(2, 0, 3),
        "transposed": drawn(rank, 4, 3).t(),
        "every second": drawn(rank, 8)[::2],
        "expanded": drawn(rank, 1).expand(4),
        "wants a gradient": drawn(rank, 3).requires_grad_(),
        "of 40 KB": drawn(rank, 100, 100),
        "of 1.2 MB": drawn(rank, 300, 1000),
        "of 1.2 MB, transposed": drawn(rank, 300, 1000).t(),
        **{str(dtype): drawn(rank, 5, dtype=dtype) for dtype in [*FLOATS, *WHOLE, *ODD]},
    }


def tried(call: Callable[[], Any]) -> Any:
    try:
        return typed(call())
    except Exception as error:
        return "raised", isinstance(error, TypeError)


def everything(peer: Peer) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # of gradients that go through Accelerate's own all-reduce
    accelerator = peer.Accelerator()
    doors, rank = peer.door("utils.operations"), accelerator.process_index
    several = accelerator.num_processes > 1
    found: dict[str, Any] = {}
    for name, tensor in {**shapes(rank), "nest": nest(rank)}.items():
        found[f"gather, {name}"] = tried(lambda tensor=tensor: accelerator.gather(tensor))
        found[f"broadcast, {name}"] = tried(lambda tensor=tensor: _broadcast(doors, tensor, several))
        found[f"pad, {name}"] = tried(lambda tensor=tensor: accelerator.pad_across_processes(tensor))
        found[f"metrics, {name}"] = tried(lambda tensor=tensor: accelerator.gather_for_metrics(tensor))
        if name in map(str, [*WHOLE, *ODD]):
            continue
        for reduction in ("sum", "mean", "max", "none"):
            if (reduction, name) != ("mean", "nest"):  # it holds whole numbers, which Accelerate can't divide
                call = f"reduce {reduction}, {name}"
                found[call] = tried(lambda tensor=tensor, how=reduction: _reduce(accelerator, tensor, how, several))
    found.update(_uneven(accelerator, rank), **_objects(doors, rank), **_not_tensors(accelerator, rank))
    for dtype in WHOLE:
        for reduction in ("sum", "max"):
            tensor = drawn(rank, 4, dtype=dtype)
            found[f"reduce {reduction}, {dtype}"] = typed(accelerator.reduce(tensor, reduction))
    return found


def _broadcast(doors: Any, tensor: Any, several: bool) -> Any:
    copied = doors.recursively_apply(lambda leaf: leaf.detach().contiguous().clone(), tensor)
    return doors.broadcast(copied, from_process=1 if several else 0)


def _reduce(accelerator: Any, tensor: Any, reduction: str, several: bool) -> Any:
    # Accelerate says "none" and adds up
    return reduction if several and reduction == "none" else accelerator.reduce(tensor, reduction)


def _uneven(accelerator: Any, rank: int) -> dict[str, Any]:
    uneven = {
        "first": torch.full((rank + 1, 2), float(rank)),
        "second": [torch.full((2, 3 - rank), rank), torch.full((2, rank * 2000 + 1), rank)],
        "zero": torch.full((rank, 2), 1.0),
        "number": torch.tensor(rank),
    }
    calls = [(dim, index, first) for dim in (0, 1, -1, -2, 5) for index in (0, 7) for first in (False, True)]
    return {f"pad {call}": tried(lambda call=call: accelerator.pad_across_processes(uneven, *call)) for call in calls}


def _objects(doors: Any, rank: int) -> dict[str, Any]:
    return {
        "objects": doors.gather_object([rank, "text", {"a": rank}]),
        "many objects": doors.gather_object(["x" * 30000 * (rank + 1)]),
        "no objects": doors.gather_object([]),
        "objects of one": doors.broadcast_object_list([rank, None, "y" * 9000 * (rank + 1)]),
    }


def _not_tensors(accelerator: Any, rank: int) -> dict[str, Any]:
    single = accelerator.num_processes == 1
    return {
        f"{name}, {value!r}": tried(lambda name=name, value=value: getattr(accelerator, name)(value))
        for name in ("gather", "reduce", "pad_across_processes")
        for value in ("text", [1, 2], {"a": None})
        if not (single and name == "gather")
    } | {f"batch, {single}": tried(lambda: accelerator.reduce(Batch(torch.ones(1))))}


def everything_alone(peer: Peer) -> dict[str, Any]:
    for name in OF_A_LAUNCHER:
        os.environ.pop(name, None)  # a process that nobody has launched; Accelerate takes another for one of many
    return everything(peer)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_are_accelerates_to_the_last_bit(size: int) -> None:
    both = under_both(everything if size > 1 else everything_alone, size)
    for rank in range(size):
        different = [name for name, found in both.theirs[rank].items() if both.ours[rank][name] != found]
        # gloo has no int16, so Accelerate raises; here bytes travel
        assert [name for name in different if both.theirs[rank][name] != ("raised", False)] == []
        assert all("int16" in name for name in different), different


def shared_shapes() -> list[Any]:
    rank = PartialState(cpu=True).process_index
    found = []
    for number, dtype in enumerate(operations.TENSOR_TYPE_TO_INT, start=1):
        shape, dtype_number = operations.gather_tensor_shape(drawn(1, 2, 0, 3, dtype=dtype) if rank else None)
        assert dtype_number == number == their_numbers[dtype]
        found.append(shape.tolist())
    with pytest.raises(OperationError, match="no number"):
        operations.gather_tensor_shape(torch.ones(1, dtype=torch.complex64) if rank else None)
    return found


def test_the_shape_that_one_process_knows_is_sent_to_all_with_its_zeros() -> None:
    # Accelerate drops the zeros, and adds up memory that nobody has written: its answers differ from call to call
    assert run_on_ranks(shared_shapes, 2) == [[[2, 0, 3]] * 10] * 2
