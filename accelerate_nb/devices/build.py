"""For which accelerators the installed torch was built, read without importing it."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path


def torch_is_built_for(name: str) -> bool:
    """Whether `torch.version.<name>` says a version, as "cuda", "hip" and "xpu" do in builds for them."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    try:
        tree = ast.parse(version.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return False
    return any(_says(node, name) for node in tree.body)


def _says(node: ast.stmt, name: str) -> bool:
    """Whether a statement binds the name to something that is not None."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    else:
        return False
    named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return named and not (isinstance(value, ast.Constant) and value.value is None)
