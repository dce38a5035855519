"""An exception arrives with its causes and contexts, each with its lines, whatever they hold."""

import builtins
import gc
import os
import sys
import threading
import traceback
import weakref

import pytest

from accelerate_nb.errors import UnpicklableError
from accelerate_nb.failures.exception_copy import MOST_LINKS
from accelerate_nb.transport.exception_chain import portable
from accelerate_nb.transport.serializer import dump_homeward, load


class Holding(Exception):
    def __init__(self, held, other=None):
        super().__init__("holding something")
        self.held, self.other = held, other


def arrived(error, known=None):
    return load(dump_homeward(portable(error, known), known))


def caught(function):
    with pytest.raises(BaseException) as found:
        function()
    return found.value


def links(error):
    """The names of an exception and of all that led to it, as Python would tell of them."""
    names = [type(error).__name__]
    while (error := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        names.append(type(error).__name__)
    return names


def three():
    try:
        try:
            {}["first"]
        except KeyError as error:
            raise ValueError("second") from error
    except ValueError:
        raise RuntimeError("third")  # noqa: B904 - the implicit context is what is tested


def hidden():
    try:
        {}["first"]
    except KeyError:
        raise ValueError("second") from None


@pytest.mark.parametrize("known", [None, frozenset()], ids=["run", "session"])
def test_causes_and_contexts_are_what_they_were(known):
    error = arrived(caught(three), known)
    assert links(error) == ["RuntimeError", "ValueError", "KeyError"]
    assert (error.__cause__, error.__suppress_context__) == (None, False)
    assert error.__context__.__suppress_context__
    assert error.__context__.__cause__ is error.__context__.__context__


def test_a_context_that_was_set_aside_stays_so():
    error = arrived(caught(hidden))
    assert (error.__cause__, error.__suppress_context__, str(error.__context__)) == (None, True, "'first'")


def test_each_link_has_the_lines_of_its_traceback():
    error = caught(three)
    first, second = error.__context__.__cause__, error.__context__
    arrival = arrived(error)
    for sent, found in [(first, arrival.__context__.__cause__), (second, arrival.__context__)]:
        assert traceback.format_tb(found.__traceback__) == traceback.format_tb(sent.__traceback__)


def test_a_chain_keeps_nothing_of_the_process_that_restores_it():
    class Marker:
        pass

    def restoring():
        marker = Marker()
        return weakref.ref(marker), load(pickled)

    pickled = [bytes(entry) for entry in dump_homeward(portable(caught(three)))]
    gc.disable()
    try:
        marker, error = restoring()
        assert marker() is None
    finally:
        gc.enable()
    assert [frame.f_back for frame, _ in traceback.walk_tb(error.__context__.__traceback__)] == [None]


def test_a_recursion_that_led_to_an_error_is_cut_in_its_middle():
    def deeper(depth):
        return deeper(depth + 1)

    def fails():
        try:
            deeper(0)
        except RecursionError as error:
            raise ValueError("too deep") from error

    frames = traceback.extract_tb(arrived(caught(fails)).__cause__.__traceback__)
    assert len(frames) < 100
    assert [frames[0].name, frames[-1].name] == ["fails", "deeper"]


def test_notes_are_kept():
    cause = KeyError("first")
    cause.__notes__ = ["in shard 3"]
    error = ValueError("second")
    error.__cause__ = cause
    error.__notes__ = ["at step 7"]
    found = arrived(error)
    assert (found.__notes__, found.__cause__.__notes__) == (["at step 7"], ["in shard 3"])


def test_a_cause_that_can_t_be_pickled_is_reported_in_its_place():
    class Odd(Exception):
        __reduce_ex__ = None

    error = ValueError("second")
    error.__cause__ = Odd("why")
    error.__cause__.__cause__ = KeyError("first")
    found = arrived(error)
    assert links(found) == ["ValueError", "UnpicklableError", "KeyError"]
    assert isinstance(found.__cause__, UnpicklableError)
    assert str(found.__cause__).startswith(f"{Odd.__qualname__}: why (")
    assert "could not be pickled" in str(found.__cause__)


def test_a_cause_of_which_only_the_message_travels_names_what_was_left():
    error = ValueError("second")
    error.__cause__ = Holding(threading.Lock())
    error.__cause__.__notes__ = ["in shard 3"]
    found = arrived(error).__cause__
    assert (type(found), found.args) == (Holding, ("holding something",))
    assert found.__notes__[0] == "in shard 3"
    assert "cannot pickle '_thread.lock' object" in found.__notes__[1]
    # where its arguments can't, its text does
    found = arrived(ValueError("with", threading.Lock()))
    assert type(found) is ValueError
    assert str(found).startswith("('with', <unlocked _thread.lock")


def test_a_cause_whose_class_is_not_found_on_arrival_leaves_the_rest_alone(monkeypatch):
    module = type(os)("only_in_the_worker")
    module.Lost = type("Lost", (Exception,), {"__module__": module.__name__})
    error = KeyError("first")
    error.__cause__ = module.Lost("gone")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    pickled = dump_homeward(portable(error))
    monkeypatch.delitem(sys.modules, module.__name__)
    found = load(pickled)
    assert links(found) == ["KeyError", "UnpicklableError"]
    assert str(found.__cause__).startswith("Lost: gone (")
    assert "No module named 'only_in_the_worker'" in str(found.__cause__)


def test_what_an_exception_held_is_free_once_it_was_sent_and_let_go():
    held = []

    def fails():
        large = threading.local()
        held.append(weakref.ref(large))
        raise ValueError("no")

    def sent():
        try:
            fails()
        except ValueError as error:
            dump_homeward(portable(error))

    gc.disable()
    try:
        sent()
        # not only when the garbage is collected: it may be the memory of a GPU
        assert held[0]() is None
    finally:
        gc.enable()


def test_a_cycle_arrives_as_a_cycle():
    first, second = KeyError("first"), ValueError("second")
    first.__context__, second.__cause__ = second, first
    found = arrived(second)
    assert found.__cause__.__context__ is found
    assert traceback.format_exception(type(found), found, None)


def test_an_attribute_that_is_one_of_the_causes_is_the_same_object():
    first = KeyError("first")
    second = Holding(1, other=first)
    second.__cause__ = first
    found = arrived(second)
    assert found.other is found.__cause__


def test_a_long_chain_keeps_what_is_nearest():
    error = ValueError(0)
    for number in range(1, 2000):
        outer = ValueError(number)
        outer.__context__ = error
        error = outer
    found = arrived(error)
    assert found.args == (1999,)
    assert len(links(found)) == MOST_LINKS


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups are of Python 3.11")
def test_the_exceptions_of_a_group_have_their_causes_too():
    inner = caught(three)
    group_class = builtins.ExceptionGroup
    group = group_class("several", [inner, Holding(threading.Lock()), group_class("more", [OSError(2, "no")])])
    found = arrived(group)
    assert (type(found), found.message) == (group_class, "several")
    assert [type(item) for item in found.exceptions] == [RuntimeError, Holding, group_class]
    assert links(found.exceptions[0]) == ["RuntimeError", "ValueError", "KeyError"]
    assert traceback.format_tb(found.exceptions[0].__traceback__) == traceback.format_tb(inner.__traceback__)
    assert found.exceptions[2].exceptions[0].errno == 2
