"""Every file opens with the one sentence that it is."""

import ast
import re

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
