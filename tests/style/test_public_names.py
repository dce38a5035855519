"""The public names: a list that changes only on purpose, and every name on it is there."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import accelerate_nb
from tests.style.source_files import Module, modules
from tests.style.test_layers import re_exports

FROZEN = Path(__file__).with_name("public_names.txt")
RE_EXPORTING = [module for module in modules() if re_exports(module)]


def offered(module: Module) -> set[str]:
    """The names that a file imports `as` something, and with `*` what another such file offers, or a module's `__all__`."""
    imports = [node for node in module.tree.body if isinstance(node, ast.ImportFrom)]
    found = {alias.asname for node in imports for alias in node.names if alias.asname}
    return found.union(*(listed_by(node.module or "") for node in imports if node.names[0].name == "*"))


def listed_by(name: str) -> set[str]:
    others = (offered(other) for other in RE_EXPORTING if other.name == name)
    return next(others, None) or set(getattr(import_module(name), "__all__", ()))


def test_the_public_names_are_those_of_the_list() -> None:
    listed = FROZEN.read_text(encoding="utf-8").split()
    now = {f"accelerate_nb.{name}" for name in accelerate_nb.__all__}
    now.update(f"{module.name}.{name}" for module in RE_EXPORTING for name in offered(module))
    gone, new = sorted(set(listed) - now), sorted(now - set(listed))
    assert not gone, f"these public names are gone, and people import them: {gone}"
    assert not new, f"these public names are new; if that is meant, add them to {FROZEN.name}: {new}"
    assert listed == sorted(listed)


def failed_import(name: str) -> str | None:
    """Why a public name can't be imported; `None` if it can."""
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:
        return f"{name}: {error!r}"
    return f"{name} is None" if found is None else None


def test_every_public_name_can_be_imported() -> None:
    assert [why for name in FROZEN.read_text(encoding="utf-8").split() if (why := failed_import(name))] == []


def hidden_names(module: Module) -> list[str]:
    """What a re-exporting file imports for itself alone: neither `a as a`, nor `*` from what lists what it offers."""
    imports = [node for node in module.tree.body if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    nodes = [node for node in imports if node.names[0].name != "*" or not listed_by(node.module or "")]
    return [f"{module.name}.{alias.name}" for node in nodes for alias in node.names if alias.asname is None]


def test_a_file_that_re_exports_uses_no_name_itself() -> None:
    assert [name for module in RE_EXPORTING for name in hidden_names(module)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        accelerate_nb.no_such_name  # noqa: B018


def test_dir_lists_every_public_name() -> None:
    assert set(accelerate_nb.__all__) <= set(dir(accelerate_nb))
