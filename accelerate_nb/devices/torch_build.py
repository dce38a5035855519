"""The build of the installed torch, read without importing it."""

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def torch_is_built_for(name: str) -> bool:
    """Whether `torch.version.<name>` holds a version, as "cuda", "hip" and "xpu" do in builds for them."""
    return _constant(name) is not None


def torch_version() -> str | None:
    """`torch.__version__`: it ends in what the package was built for (`+cu130`), unlike the name of a package on PyPI."""
    found = _constant("__version__")
    return found if isinstance(found, str) else None


def _constant(name: str) -> object:
    """What torch's file of versions binds to a name; `None` where it binds nothing."""
    spec = find_spec("torch")
    return None if spec is None or spec.origin is None else _constants(Path(spec.origin)).get(name)


@cache
def _constants(torch: Path) -> Mapping[str, object]:
    """What the file of versions binds, beside torch's own; of what is computed, the expression."""
    try:
        statements = ast.parse(torch.with_name("version.py").read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return {}
    found: dict[str, object] = {}
    for node in statements:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = node.value.value if isinstance(node.value, ast.Constant) else node.value
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    return found
