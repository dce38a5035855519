"""The build of the installed torch, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def torch_is_built_for(name: str) -> bool:
    """Whether `torch.version.<name>` holds a version, as "cuda", "hip" and "xpu" do in builds for them."""
    return any(not (isinstance(value, ast.Constant) and value.value is None) for value in _values(name))


def torch_version() -> str | None:
    """`torch.__version__`: it ends in what the package was built for (`+cu130`), unlike the name of a package on PyPI."""
    texts = [value.value for value in _values("__version__") if isinstance(value, ast.Constant)]
    return next((text for text in texts if isinstance(text, str)), None)


def _values(name: str) -> Iterator[ast.expr]:
    """The values that torch's file of versions binds to a name."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    for node in _statements(Path(spec.origin).with_name("version.py")):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if node.value is not None and any(isinstance(target, ast.Name) and target.id == name for target in targets):
            yield node.value


@cache
def _statements(file: Path) -> list[ast.stmt]:
    try:
        return ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return []
