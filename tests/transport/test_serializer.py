"""Values arrive as they were: tensors with their views, strides and shared memory, arrays, functions and classes."""

import functools
import os
import sys
import threading

import numpy as np
import pytest
import torch

from accelerate_nb.errors import LaunchError, PayloadError
from accelerate_nb.transport.memory_file import map_entries, memory_file, write_entries
from accelerate_nb.transport.payload import FunctionCall, pack
from accelerate_nb.transport.serializer import dump, dump_homeward, load
from tests.waiting import until


def travelled(value):
    """The value after its way through a memory file."""
    descriptor = memory_file("test")
    try:
        write_entries(descriptor, dump(value))
        return load(map_entries(descriptor))
    finally:
        os.close(descriptor)


BASE = torch.arange(24, dtype=torch.float32).reshape(4, 6)
TENSORS = {
    "plain": BASE,
    "transposed": BASE.T,
    "part": BASE[1:3, ::2],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "number": torch.tensor(3.5),
    "empty": torch.empty(0),
    "empty with a shape": torch.empty(3, 0, 2),
    "view at the end": BASE[4:],
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.tensor([1.5, -2], dtype=torch.bfloat16),
    "half": torch.tensor([1.5, -2], dtype=torch.float16),
    "complex": torch.tensor([1 + 2j, 3], dtype=torch.complex64),
    "conjugate": torch.tensor([1 + 2j, 3], dtype=torch.complex64).conj(),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "int64": torch.tensor([2**62]),
    "float8": torch.tensor([1.0, 2.0, 3.0]).to(torch.float8_e4m3fn)[::2],
    "uint16": torch.tensor([1, 2], dtype=torch.uint16),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_arrives_with_its_values_type_and_strides(tensor):
    # whatever device new tensors are made on
    with torch.device("meta"):
        found = travelled(tensor)
    assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert found.storage_offset() == tensor.storage_offset()
    assert found.is_conj() == tensor.is_conj()
    assert found.tolist() == tensor.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_stays_one_and_requires_gradients_as_before(dtype, requires_grad):
    found = travelled({"weight": torch.nn.Parameter(BASE.to(dtype), requires_grad=requires_grad)})["weight"]
    assert (type(found), found.dtype, found.requires_grad) == (torch.nn.Parameter, dtype, requires_grad)


def test_views_of_one_tensor_are_views_of_one_tensor_afterwards():
    base = torch.zeros(10)
    first, second, whole = travelled((base[:6], base[4:], base))
    first[4] = 7
    assert second[0] == 7
    assert whole[4] == 7
    assert base[4] == 0


def test_a_storage_travels_once_however_many_views_it_has():
    base = torch.zeros(1_000_000)
    assert sum(memoryview(entry).nbytes for entry in dump([base[i:] for i in range(20)])) < 4_100_000


def test_tensors_are_not_copied_on_their_way():
    base = torch.zeros(1000)
    _, buffer = dump(base)
    assert np.frombuffer(buffer, dtype=np.uint8).ctypes.data == base.data_ptr()
    descriptor = memory_file("test")
    write_entries(descriptor, dump(base))
    entries = map_entries(descriptor)
    os.close(descriptor)
    assert load(entries).data_ptr() == np.frombuffer(entries[1], dtype=np.uint8).ctypes.data


def test_a_model_with_tied_weights_arrives_tied_and_trainable():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    found, found_optimizer = travelled((model, optimizer))
    assert found[1].weight is found[0].weight
    assert found_optimizer.param_groups[0]["params"][0] is found[0].weight
    found(torch.tensor([1])).sum().backward()
    found_optimizer.step()
    assert not torch.equal(found[0].weight, model[0].weight)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_arrive():
    coo = torch.tensor([[0.0, 1], [2, 0]]).to_sparse()
    found = travelled(coo)
    assert found.is_sparse
    assert torch.equal(found.to_dense(), coo.to_dense())
    csr = coo.to_dense().to_sparse_csr()
    assert torch.equal(travelled(csr).to_dense(), csr.to_dense())


def test_a_meta_tensor_arrives_without_memory():
    huge = torch.empty(10**9, 10**3, device="meta", dtype=torch.bfloat16)
    found = travelled(huge)
    assert (found.device.type, found.shape, found.dtype) == ("meta", huge.shape, huge.dtype)


def test_a_generator_of_random_numbers_goes_on_where_it_was():
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    found = travelled(generator)
    assert torch.equal(torch.rand(3, generator=found), torch.rand(3, generator=generator))


ARRAYS = {
    "plain": np.arange(12.0).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "strided": np.arange(24)[::2],
    "reversed": np.arange(5)[::-1],
    "empty": np.empty((0, 3)),
    "number": np.array(2.5),
    "objects": np.array([{"a": 1}, None], dtype=object),
    "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "text": np.array(["ä", "bc"]),
    "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_an_array_arrives(array):
    found = travelled(array)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert np.array_equal(found, array)
    # and can be written to
    found[...] = found[...]


def test_values_without_large_parts_arrive():
    value = {"a": [1, 2.5, None], (1, 2): {3}, "b": b"x" * 10, "self": slice(1, 2)}
    assert travelled(value) == value


def test_functions_with_closures_and_lambdas_arrive():
    scale, table = 3, torch.arange(4)

    def outer(value):
        def inner():
            return value * scale + int(table.sum())

        return inner()

    assert travelled(outer)(2) == 12
    assert travelled(lambda value: outer(value) + 1)(2) == 13


def test_a_class_made_in_a_function_comes_back_as_itself():
    class Local:
        def __init__(self):
            self.tensor = torch.ones(2)

    found = travelled(Local())
    assert type(found) is Local
    assert found.tensor.tolist() == [1, 1]


def test_a_homeward_value_names_the_notebook_s_classes(monkeypatch):
    main = sys.modules["__main__"]
    exec("class Homeward:\n    pass\n", vars(main))
    try:
        value = main.Homeward()
        entries = dump_homeward([value, main.Homeward])
        assert b"Homeward" in bytes(entries[0])
        assert len(entries[0]) < 100
        found, loaded_class = load(entries)
        assert type(found) is loaded_class is main.Homeward
    finally:
        del main.Homeward


def test_a_function_keeps_the_names_of_its_files():
    def outer():
        return lambda: None

    found = travelled(outer)
    assert found is not outer
    assert found.__code__.co_filename == found().__code__.co_filename == __file__


# ----------------------------------------------------------------------------------------------------- what can't travel


def complaint(function, *args, **kwargs):
    """What is said of a call that can't be packed."""
    with pytest.raises(PayloadError) as caught:
        pack(FunctionCall(function, args, kwargs))
    assert isinstance(caught.value, LaunchError)
    assert isinstance(caught.value, TypeError)
    return str(caught.value)


def test_a_closure_s_variable_is_named(tmp_path):
    with (tmp_path / "log").open("w") as handle:
        text = complaint(lambda: handle.name)
    assert "'handle', a _io.TextIOWrapper" in text
    assert "→ handle by '<lambda>'" in text


def test_what_a_nested_helper_of_a_cell_captures_is_found():
    # functions of a cell travel by value
    names = {"__name__": "__main__"}
    cell = (
        "args = numbers = (n for n in range(3))\n"
        "def helper():\n    return Exception().args or next(numbers)\n"
        "def train():\n    def inner():\n        return helper()\n    return inner()\n"
    )
    exec(compile(cell, "<cell>", "exec"), names)
    text = complaint(names["train"])
    assert "'numbers', a generator, can't be sent to the workers" in text
    assert "captured as train → helper → numbers by 'helper'" in text
    assert "Make 'numbers' inside the function" in text


class Trainer:
    def __init__(self):
        self.name = "ok"
        self.guard = threading.Lock()

    def fit(self):
        return self


def test_what_holds_the_value_is_named_wherever_it_is():
    guard = threading.Lock()

    class Config:
        held = guard

    def train(held=guard):
        return held

    loop = {"lock": guard}
    loop["self"] = loop
    for text, part in (
        (
            complaint(print, 1, [Trainer()]),
            "'.guard', a _thread.lock, can't be sent to the workers. It is captured as args[1] → [0] → .guard",
        ),
        (complaint(print, guard=guard), "'guard', a _thread.lock"),
        (complaint(functools.partial(print, 1, guard=guard)), "print → guard"),
        (complaint(Trainer().fit), "fit → self → .guard"),
        (complaint(train), "train → default 0 by 'train'"),
        (complaint(lambda: Config), "Config.held"),
        (complaint(print, loop), "'lock', a _thread.lock"),
    ):
        assert part in text


def test_an_unpicklable_value_that_can_t_be_reached_by_names_is_its_owner():
    class Odd:
        def __reduce__(self):
            raise RuntimeError("never")

    text = complaint(print, Odd())
    assert "Odd" in text
    assert "RuntimeError: never" in text


def test_a_failed_packing_leaves_no_descriptor_open():
    before = len(os.listdir("/proc/self/fd"))
    complaint(print, threading.Lock())
    # threads of other tests may have some for a moment
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)
