"""The name `accelerate`, given to this package for one process, so that code written for Hugging Face's runs on ours."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

THEIRS, OURS = "accelerate", "accelerate_nb"
# What is theirs for good: the scripts are read from their package, and what they import of `accelerate` is ours.
SCRIPTS = f"{THEIRS}.test_utils"


class _Ours(Loader):
    """Puts a module of ours where one of theirs is asked for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # what stands in `sys.modules` after this is what the importer gets: our module itself, with its own name and spec
        sys.modules[module.__name__] = import_module(self.name)


class _Finder(MetaPathFinder):
    """Answers for `accelerate` and everything below it, before Python's own finders do."""

    def __init__(self, theirs: Path) -> None:
        self.theirs = theirs

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == THEIRS or (name.startswith(f"{THEIRS}.") and not f"{name}.".startswith(f"{SCRIPTS}.")):
            return ModuleSpec(name, _Ours(OURS + name.removeprefix(THEIRS)), is_package=True)
        if name == SCRIPTS:
            folder = self.theirs / "test_utils"
            return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        return None


def install() -> None:
    """
    From here on `import accelerate` gives this package, in this process and for good.

    Modules of theirs that are loaded already are let go of; what holds on to them goes on with them, so this comes first in
    a process.
    """
    found = PathFinder.find_spec(THEIRS)
    if found is None or found.origin is None:
        raise ModuleNotFoundError("The scripts are those of Hugging Face Accelerate, which is not installed.")
    for name in [name for name in sys.modules if name == THEIRS or name.startswith(f"{THEIRS}.")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder(Path(found.origin).parent))


def under_alias(function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` returns in a process where `accelerate` is this package, and computes on the CPU."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    install()
    return function(*args)
