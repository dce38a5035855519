"""Every file opens with the one sentence that it is."""

import ast
import re

import pytest

from tests.style.source_files import ROOT, modules

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
    return None


def test_every_file_opens_with_one_sentence() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in FILES}
    assert [(path, found) for path, source in sources.items() if source.strip() and (found := fault(source))] == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import os", "no docstring"),
        ('"""\nA file.\n"""', "does not begin on its first line"),
        ('"""A file"""', "not a whole sentence"),
        ('"""A file. With more."""', "more than one sentence"),
        ('"""The reader and the writer of files."""', None),
    ],
)
def test_the_check_sees_how_a_file_opens(source: str, complaint: str | None) -> None:
    found = fault(source)
    assert found is None if complaint is None else complaint in (found or "")
