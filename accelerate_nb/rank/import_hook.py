"""Something that is done with a module right after it has been imported."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


def after_import(name: str, hook: Callable[[Any], object]) -> None:
    """Call `hook` with a module: at once where it is loaded already, else each time that it has been; nothing is imported."""
    if name in sys.modules:
        hook(sys.modules[name])
    else:
        sys.meta_path.insert(0, _HookingFinder(name, hook))


@dataclass(eq=False)
class _HookingFinder(MetaPathFinder):
    _name: str
    _hook: Callable[[Any], object]

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """The module's specification from the other finders, whose loader also calls the hook; `None` for other modules."""
        if fullname != self._name:
            return None
        # two of this class, for one module, would ask each other for ever
        others = [finder for finder in sys.meta_path if not isinstance(finder, _HookingFinder)]
        found = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((item for item in found if item is not None), None)
        loader: Any = None if spec is None else spec.loader

        # many search for a module without importing it: the hook is called for one that has run
        def exec_module(module: Any) -> None:
            del loader.exec_module
            loader.exec_module(module)
            self._hook(module)

        if loader is not None:
            loader.exec_module = exec_module
        return spec
