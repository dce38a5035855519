"""A worker's exception is told with the person's own lines, and the rest is folded."""

import json
import linecache
import sys
import traceback

import pytest

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.events.event_types import Frame
from accelerate_nb.failures.traceback_format import frames_of, frames_text, traceback_text
from accelerate_nb.sources.cells import CellSources, current_sources

NOWHERE = CellSources({}, {})


def raised(function):
    """What a function raises; the test's own frame, which called it, left out."""
    with pytest.raises(BaseException) as caught:
        function()
    return caught.value.with_traceback(caught.value.__traceback__.tb_next)


def lines_of(function, sources=NOWHERE):
    return traceback_text(raised(function), sources).split("\n")


def calls(function, sources=NOWHERE):
    return frames_of(raised(function), sources)


@pytest.fixture
def cell():
    """Runs text as a cell of a notebook, as number 4."""
    names = []

    def run(text):
        name = f"/tmp/ipykernel_1/{len(names)}.py"
        names.append(name)
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        variables = {"__name__": "__main__"}
        exec(compile(text, name, "exec"), variables)
        return variables, CellSources({name: linecache.cache[name][2]}, {name: 4})

    yield run
    for name in names:
        linecache.cache.pop(name, None)


def test_a_cell_s_lines_are_shown_with_its_number(cell):
    names, sources = cell("def f():\n    g()\ndef g():\n    raise KeyError('x')\n")
    assert lines_of(names["f"], sources) == [
        "  Cell In[4], line 2, in f",
        "    g()",
        "  Cell In[4], line 4, in g",
        "    raise KeyError('x')",
        "KeyError: 'x'",
    ]


def test_a_traceback_in_a_message_names_the_cell(cell):
    names, sources = cell("def f():\n    raise KeyError('x')\n")
    (text,) = traceback.format_exception_only(ValueError("".join(traceback.format_exception(raised(names["f"])))))

    def again():
        raise ValueError(text)

    assert "  Cell In[4], line 2, in f" in lines_of(again, sources)


def test_frames_of_installed_packages_are_folded_but_the_last():
    lines = lines_of(lambda: json.loads("{"))
    assert lines[0].startswith(f'  File "{__file__}", line ')
    assert lines[2] == "  … 2 frames in json"
    assert "decoder.py" in lines[3]
    assert lines[-1].startswith("json.decoder.JSONDecodeError: Expecting property name")


@pytest.mark.parametrize("how", ["", " from error", " from None"])
def test_causes_and_contexts_come_first_unless_suppressed(cell, how):
    text = "def f():\n    try:\n        {}['first']\n    except KeyError as error:\n        raise ValueError('second')"
    names, sources = cell(f"{text}{how}\n")
    lines = lines_of(names["f"], sources)
    if how == " from None":
        assert "KeyError: 'first'" not in lines
    else:
        assert lines.index("KeyError: 'first'") < lines.index("which led to:") < lines.index("ValueError: second")


def test_a_chain_that_bites_its_tail_ends():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first

    def fails():
        raise first

    assert lines_of(fails)[-1] == "ValueError: a"


def test_a_recursion_is_folded():
    def deeper(depth):
        return deeper(depth + 1)

    lines = lines_of(lambda: deeper(0))
    assert len(lines) < 20
    assert any("the same call" in line and "times more" in line for line in lines)
    assert lines[-1].startswith("RecursionError")
    assert len(calls(lambda: deeper(0))) < 10


def test_a_long_traceback_keeps_its_beginning_and_its_end(cell):
    calling = "".join(f"def f{i}():\n    return f{i + 1}()\n" for i in range(90))
    names, sources = cell(calling + "def f90():\n    raise OSError('end')\n")
    lines = lines_of(names["f0"], sources)
    assert len(lines) < 20
    assert lines[0] == "  Cell In[4], line 2, in f0"
    assert lines[-2:] == ["    raise OSError('end')", "OSError: end"]
    assert any("lines more …" in line for line in lines)
    functions = [frame.function for frame in calls(names["f0"], sources)]
    assert (functions[0], functions[-1], len(functions)) == ("f0", "f90", 60)


def test_a_message_of_a_megabyte_is_cut(cell):
    names, sources = cell("def f():\n    raise ValueError('x' * 1_000_000)\n")
    assert len("\n".join(lines_of(names["f"], sources))) < 5_000


def test_an_exception_that_can_t_describe_itself_is_reported_all_the_same(cell):
    mute = "class Mute(Exception):\n    def __str__(self):\n        raise RuntimeError('no words')\n"
    names, sources = cell(f"{mute}def f():\n    raise Mute\n")
    assert "Mute" in lines_of(names["f"], sources)[-1]


def test_a_syntax_error_shows_its_place_and_frames_end_there(cell):
    names, sources = cell("def f():\n    compile('a = = 1', '<text>', 'exec')\n")
    lines = lines_of(names["f"], sources)
    assert lines[-1] == "SyntaxError: invalid syntax"
    assert "    a = = 1" in lines
    assert calls(names["f"], sources)[-1] == Frame('File "<text>", line 1', "<syntax>", "a = = 1", own=True)


def test_notes_are_reported(cell):
    names, sources = cell("def f():\n    e = ValueError('wrong')\n    e.__notes__ = ['in batch 7']\n    raise e\n")
    assert "in batch 7" in "\n".join(lines_of(names["f"], sources)) or not hasattr(ValueError, "add_note")


def test_no_frames_are_no_lines():
    assert frames_text([], current_sources()) == []
    assert frames_text(traceback.StackSummary.from_list([("a.py", 3, "f", "x = 1")]), NOWHERE) == [
        '  File "a.py", line 3, in f',
        "    x = 1",
    ]


def test_this_package_s_frames_are_folded_wherever_it_is_installed():
    def fails():
        from accelerate_nb.config.run_config import resolve

        resolve({"num_processes": -3}, {})

    lines = lines_of(fails)
    assert sum("accelerate_nb" in line for line in lines[:-1]) == 1
    assert lines[-2].startswith("  … ")
    assert lines[-2].endswith(" in accelerate_nb")
    assert lines[-1].startswith(f"{ConfigurationError.__module__}.ConfigurationError: ")
    assert [frame.own for frame in calls(fails)] == [True] + [False] * (len(calls(fails)) - 1)


def test_installed_frames_between_the_person_s_are_one_line():
    def odd(value):
        raise KeyError("odd")

    lines = lines_of(lambda: json.dumps(object(), default=odd))
    assert lines[2] == "  … 3 frames in json"
    assert lines[3].startswith(f'  File "{__file__}", line ')
    assert lines[-1] == "KeyError: 'odd'"


def test_frames_name_places_as_people_do_and_their_owner(cell):
    names, sources = cell("import json\ndef f():\n    return json.loads('{')\n")
    outermost, *inner = calls(names["f"], sources)
    assert outermost == Frame("Cell In[4], line 3", "f", "return json.loads('{')", own=True)
    assert {frame.own for frame in inner} == {False}
    assert [frame.function for frame in inner] == ["loads", "decode", "raw_decode"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_a_group_shows_its_exceptions(cell):
    names, sources = cell("""
def one(number):
    raise ValueError(number)
def f():
    errors = []
    for number in range(5):
        try:
            one(number)
        except ValueError as error:
            errors.append(error)
    raise ExceptionGroup("several", errors)
""")
    lines = lines_of(names["f"], sources)
    assert "ExceptionGroup: several (5 sub-exceptions)" in lines
    assert "  1 of 5:" in lines
    assert "  … and 2 more" in lines
    frames = calls(names["f"], sources)
    assert [frame.function for frame in frames] == ["f", "f", "one"]
