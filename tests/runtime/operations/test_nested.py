"""Operations see through lists, tuples and mappings, as Hugging Face Accelerate's do."""

import pickle
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import accelerate.utils.operations as theirs
import pytest
import torch

import accelerate_nb.utils.operations as ours
from accelerate_nb.errors import AccelerateNbError
from tests.runtime.data.loaders import typed

Pair = namedtuple("Pair", ["first", "second"])


def nest() -> Any:
    return {
        "plain": torch.arange(6.0).reshape(3, 2),
        "pair": Pair(torch.arange(3, dtype=torch.int32), [torch.ones(3, 1, dtype=torch.bfloat16), "text", None]),
        "ordered": OrderedDict(half=torch.ones(3, dtype=torch.float16), number=4),
        "tuple": (torch.tensor([True, False, True]),),
    }


@pytest.mark.parametrize(
    "call",
    [
        lambda door, data: door.recursively_apply(torch.neg, {"a": [torch.ones(2), "text"]}),
        lambda door, data: door.recursively_apply(str.upper, data, test_type=lambda leaf: isinstance(leaf, str)),
        lambda door, data: door.send_to_device(data, "cpu"),
        lambda door, data: door.get_data_structure(data),
        lambda door, data: door.get_shape(data),
        lambda door, data: door.find_batch_size(data),
        lambda door, data: door.find_device(data),
        lambda door, data: door.find_device({"a": ["text"]}),
        lambda door, data: door.listify(data),
        lambda door, data: door.slice_tensors(data, slice(1, 3)),
        lambda door, data: door.convert_to_fp32(data),
        lambda door, data: door.concatenate([data["pair"][0], data["pair"][0]]),
        lambda door, data: door.concatenate([{"a": (torch.ones(1, 2),)}, {"a": (torch.zeros(1, 3),)}], dim=1),
        lambda door, data: door.concatenate([["text"]]),
        lambda door, data: door.get_data_structure(door.initialize_tensors(door.get_data_structure(data["tuple"]))),
        lambda door, data: door.honor_type(data["pair"], iter([1, 2])),
        lambda door, data: [door.is_namedtuple(item) for item in (data["pair"], (1, 2), [1])],
        lambda door, data: [door.is_torch_tensor(item) for item in (data["plain"], 1)],
        lambda door, data: door.ignorant_find_batch_size([]),
        lambda door, data: door.ignorant_find_batch_size(["text"]),
        lambda door, data: door.convert_outputs_to_fp32(lambda: data)(),
        lambda door, data: door.pad_input_tensors(torch.ones(3, 2), 3, 4),
    ],
)
def test_results_are_accelerates(call: Any) -> None:
    assert typed(call(ours, nest())) == typed(call(theirs, nest()))


@pytest.mark.parametrize(
    ("rows", "processes", "padded"), [(8, 4, 8), (9, 4, 12), (3, 4, 4), (6, 2, 6), (5, 1, 5), (0, 2, 0)]
)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_inputs_are_padded_with_zeros_to_the_next_multiple(rows: int, processes: int, padded: int, dim: int) -> None:
    given = torch.ones(rows, 2) if dim == 0 else torch.ones(2, rows)
    found = ours.pad_input_tensors({"x": [given]}, rows, processes, dim)["x"][0]
    assert found.shape[dim] == padded
    assert torch.equal(found.narrow(dim, 0, rows), given)
    assert found.sum() == given.sum()


class Encoding(UserDict):
    """A mapping that holds more than its items, as those of tokenizers do."""

    def __init__(self, items: Any = (), *, n_sequences: int) -> None:
        super().__init__(items)
        self.n_sequences = n_sequences


def test_mappings_keep_their_type_and_what_else_they_hold() -> None:
    half = torch.ones(1, dtype=torch.float16)
    mappings = Encoding({"a": half}, n_sequences=2), defaultdict(list, a=half), OrderedDict(a=half)
    for mapping in mappings:
        converted = ours.convert_to_fp32(mapping)
        for result in (converted, ours.send_to_device(mapping, "cpu"), ours.concatenate([mapping, mapping])):
            assert type(result) is type(mapping)
        assert (converted["a"].dtype, mapping["a"].dtype) == (torch.float32, torch.float16)
    assert ours.convert_to_fp32(mappings[0]).n_sequences == 2
    assert ours.convert_to_fp32(defaultdict(list))["new"] == []


def test_keys_can_stay_where_they_are_and_what_knows_how_to_move_moves_itself() -> None:
    sent = ours.send_to_device({"a": torch.ones(1), "b": [torch.ones(1)]}, "meta", skip_keys="a")
    assert (sent["a"].device.type, sent["b"][0].device.type) == ("cpu", "meta")

    class Batch:
        def to(self, device: str) -> str:
            return f"on {device}"

    assert ours.send_to_device([Batch()], "cpu", non_blocking=True) == ["on cpu"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ours.find_batch_size([]), ValueError, "empty list"),
        (lambda: ours.find_batch_size({"a": "text"}), TypeError, "in a str"),
        (lambda: ours.find_batch_size(torch.tensor(1)), ValueError, "without dimensions"),
        (lambda: ours.concatenate(["a", "b"]), TypeError, "there is a str"),
        (
            lambda: ours.recursively_apply(torch.neg, [1], error_on_other_type=True),
            TypeError,
            r"neg was given an int \(1\) at \[0\]",
        ),
    ],
)
def test_what_cannot_be_worked_on_is_an_error(call: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, AccelerateNbError)


def test_a_converting_forward_explains_how_to_pickle_the_model() -> None:
    with pytest.raises(pickle.PicklingError, match="keep_fp32_wrapper=False"):
        pickle.dumps(ours.ConvertOutputsToFp32(len))
