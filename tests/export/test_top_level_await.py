"""`await` outside of functions: a cell's names stay the script's own."""

import ast
import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_nb.export.python_source import DefinitionFinder, guarded, is_async, with_global_annotations


def ran(source: str) -> dict[str, Any]:
    """The names that a cell leaves behind."""
    names: dict[str, Any] = {"__name__": "__main__", "nb_shell": SimpleNamespace(wait=asyncio.run)}
    lines = guarded(with_global_annotations(source), 1, DefinitionFinder())
    assert [line.strip() for line in lines if not line.endswith("  # +")]
    exec("\n".join(lines), names)
    return {name: value for name, value in names.items() if isinstance(value, (int, str, list))}


ASYNC = """import asyncio
class Stream:
    async def __aenter__(self): return self
    async def __aexit__(self, *_): pass
    async def __aiter__(self):
        yield 1
        yield 2
"""


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = await asyncio.sleep(0, 3)", {"x": 3}),
        ("x: int = await asyncio.sleep(0, 3)\ny: 'list[int]' = [x]\nz: str", {"x": 3, "y": [3]}),
        ("x: dict[\n  str, int\n] = (\n  await asyncio.sleep(0, 3))", {"x": 3}),
        ("async with Stream() as s:\n    x = 1", {"x": 1}),
        ("async for x in Stream():\n    last = x", {"x": 2, "last": 2}),
        ("x = [y async for y in Stream()]", {"x": [1, 2]}),
        ("x = [z := y async for y in Stream()]", {"x": [1, 2], "z": 2}),
        ("x = 1\ndef f():\n    return x\nx = await asyncio.sleep(0, 5)\ny = f()", {"x": 5, "y": 5}),
        ("t = asyncio.create_task(asyncio.sleep(0, 4))", {}),
        ("x = 1; y = await asyncio.sleep(0, x)\nfrom os.path import sep", {"x": 1, "y": 1, "sep": "/"}),
        ("import os.path as p; await asyncio.sleep(0); q = p.sep", {"q": "/"}),
        (
            "try:\n    await asyncio.sleep(0)\n    1 / 0\nexcept ZeroDivisionError as e:\n    x = str(e)",
            {"x": "division by zero"},
        ),
        ("match await asyncio.sleep(0, [1, 2, 3]):\n    case [a, *b]:\n        pass", {"a": 1, "b": [2, 3]}),
    ],
)
def test_a_cell_leaves_the_same_names_as_in_a_notebook(source, names):
    found = ran(ASYNC + source)
    assert {name: found[name] for name in found if not name.startswith("__")} == names


def test_a_cell_keeps_its_lines():
    source = "await f()\nx: dict[\n    str, int,\n] = g()\ny: int\nprint(x)"
    plain = with_global_annotations(source)
    assert plain.split("\n")[0] == "await f()"
    assert len(plain.split("\n")) == len(source.split("\n"))
    assert with_global_annotations("x: int = f()") == "x: int = f()"


def test_what_awaits_only_in_functions_is_not_asynchronous():
    assert not is_async(
        ast.parse("async def f():\n    await g()\nx = f()\nclass A:\n    async def f(self): await g()").body
    )
