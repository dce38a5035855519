"""How the house is read: every file of the package, and what each imports, without importing any of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "accelerate_nb"


@dataclass(frozen=True)
class Import:
    """A module, or a name in one, that a file imports; `when` says at what time that happens."""

    target: str
    line: int
    when: str  # "import": with the file; "call": in a function; "types": only for a type checker


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    path: Path
    root: Path = ROOT

    @cached_property
    def name(self) -> str:
        """Its dotted name."""
        parts = self.path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def room(self) -> str:
        """The folder or the top-level file that it belongs to: `launch`, `errors`; empty for the package's own file."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.path.read_text(encoding="utf-8"), filename=str(self.path))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Everything that it imports, in the order of its lines."""
        return tuple(self._walk(self.tree, "import"))

    def _walk(self, node: ast.AST, when: str) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, when) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from (Import(f"{self._source(child)}.{alias.name}", child.lineno, when) for alias in child.names)
            elif isinstance(child, ast.If) and _is_for_type_checkers(child):
                for part in child.body:
                    yield from self._walk(ast.Module([part], []), "types")
                for part in child.orelse:
                    yield from self._walk(ast.Module([part], []), when)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield from self._walk(child, "call" if when == "import" else when)
            else:
                yield from self._walk(child, when)

    def _source(self, node: ast.ImportFrom) -> str:
        assert node.level == 0, f"{self.path}:{node.lineno} imports relatively"
        return node.module or ""


def _is_for_type_checkers(node: ast.If) -> bool:
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def modules(package: Path = PACKAGE) -> list[Module]:
    """Every file of the package, in the order of their names."""
    return [Module(path, package.parent) for path in sorted(package.rglob("*.py"))]


def resolved(target: str, known: set[str]) -> str | None:
    """The module of this package that an import's target is in; `None` for what is not of this package."""
    while target:
        if target in known:
            return target
        target = target.rpartition(".")[0]
    return None
