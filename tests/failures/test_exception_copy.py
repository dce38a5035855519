"""Exceptions are made anew from what they hold, whatever their classes look like."""

import json
import subprocess
from dataclasses import dataclass

import pytest
import torch

from accelerate_nb.failures import exception_copy
from accelerate_nb.transport.serializer import dump, load


class Wants(Exception):
    def __init__(self, first, *, second):
        super().__init__(f"{first} and {second}")
        self.second = second


class Kept(OSError):
    def __init__(self, path):
        super().__init__(2, "not here", path)


class Made(Exception):
    def __new__(cls, text, number):
        error = super().__new__(cls, text)
        error.number = number
        return error

    def __init__(self, text, number):
        super().__init__(text)


@dataclass(frozen=True)
class Frozen(Exception):
    step: int


class Slotted(ValueError):
    __slots__ = ("extra",)

    def __init__(self, extra):
        super().__init__("slotted")
        self.extra = extra


ERRORS = [
    *(KeyError("x"), ValueError(), SystemExit(3), StopIteration(5), ImportError("no", name="m", path="p")),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    *(OSError(2, "not here", "a.txt"), FileNotFoundError(2, "not here", "a", None, "b")),
    *(SyntaxError("bad", ("f.py", 1, 2, "text")), subprocess.CalledProcessError(1, "ls", output=b"o")),
    *(json.JSONDecodeError("bad", "doc", 1), torch.OutOfMemoryError("too much")),
    torch.distributed.DistBackendError("gloo"),
    *(Wants(1, second=2), Kept("a.txt"), Made("text", 7), Frozen(3), Slotted([1])),
]


@pytest.mark.parametrize("error", ERRORS, ids=type)
def test_an_exception_made_anew_is_the_same(error):
    found = exception_copy.rebuilt_exception(type(error), error.args, exception_copy.exception_values(error))
    assert type(found) is type(error)
    assert found.args == error.args
    assert str(found) == str(error)
    assert exception_copy.exception_values(found) == exception_copy.exception_values(error)
    # and after its way to another process
    (arrived,) = load(dump([error]))
    assert (type(arrived), arrived.args, str(arrived)) == (type(error), error.args, str(error))
    assert exception_copy.exception_values(arrived) == exception_copy.exception_values(error)


def test_what_c_keeps_is_held_too():
    assert exception_copy.exception_values(OSError(2, "not here", "a.txt"))["filename"] == "a.txt"
    assert exception_copy.exception_values(SystemExit(3))["code"] == 3
    assert exception_copy.exception_values(Slotted([1]))["extra"] == [1]
    assert exception_copy.exception_values(KeyError("x")) == {}


@pytest.mark.parametrize("error", [KeyError("x"), Frozen(3)], ids=type)
def test_an_exception_of_elsewhere_keeps_its_context_where_another_is_handled(error):
    context = ValueError("its own")
    object.__setattr__(error, "__context__", context)
    with pytest.raises(type(error)) as caught:
        try:
            raise LookupError("handled here")
        except LookupError:
            exception_copy.raise_as_it_is(error)
    assert caught.value.__context__ is context
