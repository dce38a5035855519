"""Something that is done with a module right after it has been imported."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


def after_import(name: str, hook: Callable[[Any], object]) -> None:
    """Call `hook` with a module: at once where it is loaded already, else each time that it has been; nothing is imported."""
    if name in sys.modules:
        hook(sys.modules[name])
        return
    finder = next((item for item in sys.meta_path if isinstance(item, _HookingFinder) and item.name == name), None)
    if finder is None:
        finder = _HookingFinder(name)
        sys.meta_path.insert(0, finder)
    finder.hooks.append(hook)


@dataclass(eq=False)
class _HookingFinder(MetaPathFinder):
    name: str
    hooks: list[Callable[[Any], object]] = field(default_factory=list)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """The module's specification from the other finders, whose loader also calls the hook; `None` for other modules."""
        if fullname != self.name:
            return None
        # its own would ask itself for ever
        others = [finder for finder in sys.meta_path if not isinstance(finder, _HookingFinder)]
        found = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((item for item in found if item is not None), None)
        loader: Any = None if spec is None else spec.loader

        # many search for a module without importing it: the hook is called for one that has run
        def exec_module(module: Any) -> None:
            del loader.exec_module
            loader.exec_module(module)
            for hook in self.hooks:
                hook(module)

        if loader is not None:
            loader.exec_module = exec_module
        return spec
