"""What a statement does with names is found alike on every Python, whose compilers make different code of it."""

from __future__ import annotations

import ast
import sys

import pytest

from accelerate_nb.export.rank_cells.name_usage import NameUsage, usage_of


def usage(source: str) -> NameUsage:
    """What the one statement of a source does."""
    (node,) = ast.parse(source).body
    return usage_of(node)


@pytest.mark.parametrize(
    ("source", "read", "later"),
    [
        ("y = [x * z for x in data if any(x == o for o in others)]", "any data others z", ""),
        ("y = {x: [w for w in x] for x in data}", "data", ""),
        ("y = [lambda: x + z for x in data]", "data z", "z"),
        ("class A(Base):\n  xs = [1]\n  ys = [x + off for x in xs if x in allowed]", "Base allowed off", ""),
        (
            "class A:\n  z = [lambda: (i, size) for i in data]\n  def m(self): return super().m(of)",
            "data",
            "of size super",
        ),
        ("def f(x: T, y=default) -> R:\n  return [g(x) for x in items]", "R T default", "g items"),
        ("text = f'{a!r:>{width}} {b=}'", "a b width", ""),
    ],
)
def test_comprehensions_classes_and_texts_read_the_same_names_on_each_python(
    source: str, read: str, later: str
) -> None:
    found = usage(source)
    assert (sorted(found.read), sorted(found.deferred)) == (read.split(), later.split())
    assert len(found.bound) == 1


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters came with Python 3.12")
@pytest.mark.parametrize(
    ("source", "read", "later"),
    [
        ("def f[T](x: T, y: Of = default) -> R:\n  return T, g", "Of R default", "g"),
        ("class A[T](Base[T]):\n  size = len(items)\n  def m(self): return helper", "Base items len", "helper"),
        # a bound is only looked at by who asks for it
        ("def f[T: Bound](x: T): pass", "", "Bound"),
    ],
)
def test_what_has_type_parameters_reads_its_bases_and_annotations_where_it_stands(
    source: str, read: str, later: str
) -> None:
    found = usage(source)
    assert (sorted(found.read), sorted(found.deferred)) == (read.split(), later.split())
