"""What can't travel is named: the variable, its type, and what captures it."""

from __future__ import annotations

import functools
import threading

import pytest

from accelerate_nb.errors import LaunchError, PayloadError
from accelerate_nb.sources.cells import current_sources
from accelerate_nb.transport.payload import FunctionCall, pack

LOCK = "a lock that module-level functions would capture, if they travelled by value"


def complaint(function, *args, **kwargs):
    """What is said of a call that can't be packed."""
    with pytest.raises(PayloadError) as caught:
        pack(FunctionCall(function, args, kwargs))
    assert isinstance(caught.value, LaunchError)
    assert isinstance(caught.value, TypeError)
    return str(caught.value)


def in_a_cell(text):
    """What text defines that is run as a cell: its functions travel by value."""
    names = {"__name__": "__main__"}
    exec(compile(text, "<cell>", "exec"), names)
    return names


def test_a_global_of_a_cell_is_named_with_the_function_that_uses_it():
    names = in_a_cell("import threading\nmutex = threading.Lock()\ndef train():\n    with mutex:\n        return 1\n")
    text = complaint(names["train"])
    assert "'mutex', a _thread.lock, can't be sent to the workers" in text
    assert "captured as train → mutex by 'train'" in text
    assert "Make 'mutex' inside the function" in text


def test_a_closure_s_variable_is_named(tmp_path):
    with (tmp_path / "log").open("w") as handle:
        text = complaint(lambda: handle.name)
    assert "'handle', a _io.TextIOWrapper" in text
    assert "→ handle by '<lambda>'" in text


def test_what_a_nested_helper_captures_is_found():
    names = in_a_cell(
        "numbers = (n for n in range(3))\n"
        "def helper():\n    return next(numbers)\n"
        "def train():\n    def inner():\n        return helper()\n    return inner()\n"
    )
    text = complaint(names["train"])
    assert "'numbers', a generator" in text
    assert "train → helper → numbers by 'helper'" in text


def test_an_attribute_of_an_argument_is_found():
    class Model:
        def __init__(self):
            self.name = "ok"
            self.guard = threading.Lock()

    text = complaint(print, 1, [Model()])
    assert "'.guard', a _thread.lock" in text
    assert "args[1] → [0] → .guard" in text


def test_a_named_argument_and_a_partial_s_are_found():
    assert "'guard', a _thread.lock" in complaint(print, guard=threading.Lock())
    assert "guard" in complaint(functools.partial(print, guard=threading.Lock()))


def test_the_object_of_a_bound_method_is_searched():
    class Trainer:
        def __init__(self):
            self.queue = threading.Lock()

        def fit(self):
            return self

    text = complaint(Trainer().fit)
    assert "fit → self → .queue" in text


def test_a_default_argument_is_found():
    guard = threading.Lock()

    def train(held=guard):
        return held

    assert "a _thread.lock" in complaint(train)


def test_a_class_attribute_is_found():
    class Config:
        guard = threading.Lock()

    assert "Config.guard" in complaint(lambda: Config)


def test_a_structure_that_holds_itself_is_searched_only_once():
    loop = {"lock": threading.Lock()}
    loop["self"] = loop
    assert "'lock', a _thread.lock" in complaint(print, loop)


def test_an_unpicklable_value_that_can_t_be_reached_by_names_is_its_owner():
    class Odd:
        def __reduce__(self):
            raise RuntimeError("never")

    text = complaint(print, Odd())
    assert "Odd" in text
    assert "RuntimeError: never" in text


def test_a_failed_packing_leaves_no_descriptor_open():
    import os

    before = len(os.listdir("/proc/self/fd"))
    complaint(print, threading.Lock())
    assert len(os.listdir("/proc/self/fd")) == before


def test_sources_outside_of_a_notebook_hold_no_files():
    assert __file__ not in current_sources().lines
