"""Every file opens with the one sentence that it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.house.reading import ROOT, modules

FILES = [module.path for module in modules()] + sorted((ROOT / "tests").rglob("*.py"))


def fault(source: str) -> str | None:
    """What is wrong with how a file opens; `None` if nothing is."""
    docstring = ast.get_docstring(ast.parse(source))
    if not docstring:
        return "it has no docstring"
    opening = docstring.splitlines()[0]
    if not source.startswith('"""' + opening):
        return "its docstring does not begin on its first line"
    if not opening.endswith("."):
        return "its first line is not a whole sentence"
    if re.search(r"[.!?] +[A-Z]", opening):
        return "its first line is more than one sentence"
    # A file's job is said before its colon or comma; what follows tells it in full. "Saved and resumed" is one job,
    # "how it is saved and how it is shown" are two.
    job = re.split(r"[:,;(]", opening)[0]
    if re.search(r"\band (the|an?|how|what|where|who|which|when) ", job) and not re.search(r"\b(between|both) ", job):
        return f"it has two jobs: {job!r}"
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_opens_with_one_sentence(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    if source.strip():
        assert fault(source) is None


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import os", "no docstring"),
        ('"""\nA file.\n"""', "does not begin on its first line"),
        ('"""A file"""', "not a whole sentence"),
        ('"""A file. With more."""', "more than one sentence"),
        ('"""The reader and the writer of files."""', "two jobs"),
        ('"""Where files are read: their names and their lines."""', None),
        ('"""How a run is kept and how it is shown."""', "two jobs"),
        ('"""How a run is kept and found again."""', None),
        ('"""What lies between the kernel and a worker."""', None),
    ],
)
def test_the_check_sees_how_a_file_opens(source: str, complaint: str | None) -> None:
    found = fault(source)
    assert found is None if complaint is None else complaint in (found or "")
