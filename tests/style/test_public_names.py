"""The public names: a list that changes only on purpose, and every name on it is there."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import accelerate_nb
from tests.house.reading import Module, modules
from tests.house.test_floors import is_door

FROZEN = Path(__file__).with_name("public_names.txt")
DOORS = [module for module in modules() if is_door(module)]


def public_names() -> list[str]:
    """Each public name with its module, as the package has them now."""
    own = {f"accelerate_nb.{name}" for name in accelerate_nb.__all__}
    return sorted(own.union(*(passed_on(door) for door in DOORS)))


def passed_on(door: Module) -> set[str]:
    """What a door re-exports: the names that it imports `as` something."""
    imports = [node for node in door.tree.body if isinstance(node, ast.ImportFrom)]
    return {f"{door.name}.{alias.asname}" for node in imports for alias in node.names if alias.asname}


def test_the_public_names_are_those_of_the_list() -> None:
    listed = FROZEN.read_text(encoding="utf-8").split()
    now = public_names()
    gone, new = sorted(set(listed) - set(now)), sorted(set(now) - set(listed))
    assert not gone, f"these public names are gone, and people import them: {gone}"
    assert not new, f"these public names are new; if that is meant, add them to {FROZEN.name}: {new}"
    assert listed == sorted(listed)


@pytest.mark.parametrize("name", FROZEN.read_text(encoding="utf-8").split())
def test_a_public_name_can_be_imported(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert getattr(import_module(module), attribute) is not None


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_a_door_passes_on_all_that_it_imports(door: Module) -> None:
    imports = [node for node in door.tree.body if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    hidden = [alias.name for node in imports for alias in node.names if alias.asname is None]
    assert hidden == []  # `from x import a as a` says that `a` is meant for others


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        accelerate_nb.no_such_name  # noqa: B018


def test_dir_lists_every_public_name() -> None:
    assert set(accelerate_nb.__all__) <= set(dir(accelerate_nb))
