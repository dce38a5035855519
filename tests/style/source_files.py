"""Every source file of the package, and what it imports, read without importing it."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
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

    @cached_property
    def name(self) -> str:
        """Its dotted name."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def folder(self) -> str:
        """The top-level folder or file that it belongs to: `launching`, `errors`; empty for the package's `__init__.py`."""
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
            elif (target := _imported_by_name(child)) is not None:
                yield Import(target, child.lineno, "call" if when == "import" else when)
            else:
                yield from self._walk(child, when)

    def _source(self, node: ast.ImportFrom) -> str:
        assert node.level == 0, f"{self.path}:{node.lineno} imports relatively"
        return node.module or ""


def _imported_by_name(node: ast.AST) -> str | None:
    """The module of this package whose name a call of `import_module` or `__import__` is given as a string."""
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
        return None
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    name = node.args[0].value
    is_import = called in {"import_module", "__import__"} and isinstance(name, str)
    return name if is_import and name.startswith("accelerate_nb") else None


def _is_for_type_checkers(node: ast.If) -> bool:
    return "TYPE_CHECKING" in (getattr(node.test, "id", ""), getattr(node.test, "attr", ""))


@cache
def modules() -> list[Module]:
    """Every file of the package, in the order of their names; each is parsed once for all tests."""
    return [Module(path) for path in sorted(PACKAGE.rglob("*.py"))]


def resolved(target: str, known: set[str]) -> str | None:
    """The module of this package that an import's target is in; `None` for what is not of this package."""
    while target:
        if target in known:
            return target
        target = target.rpartition(".")[0]
    return None


def import_cycles(sources: list[Module]) -> list[list[str]]:
    """Groups of modules that import each other, also in functions or for type checkers: Tarjan's strongly connected components."""
    known = {module.name for module in sources}
    graph = {
        module.name: {found for item in module.imports if (found := resolved(item.target, known))} - {module.name}
        for module in sources
    }
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in index:
                visit(target)
            if target in stack:
                lowest[name] = min(lowest[name], lowest[target])
        if lowest[name] == index[name]:
            start = stack.index(name)
            if len(stack) - start > 1:
                groups.append(sorted(stack[start:]))
            del stack[start:]

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return groups


def mutual_imports(sources: list[Module], package: str) -> list[tuple[str, str]]:
    """Pairs of folders of a package, or of files in it, of which each imports the other."""
    known = {module.name for module in sources}

    def part(name: str) -> str:
        return name.removeprefix(f"{package}.").split(".")[0] if name.startswith(f"{package}.") else ""

    imported = {
        (part(module.name), part(found))
        for module in sources
        for item in module.imports
        if (found := resolved(item.target, known)) and part(module.name) != part(found)
    }
    return sorted((one, other) for one, other in imported if one and one < other and (other, one) in imported)


def _sizes(paths: Iterable[Path]) -> list[int]:
    return [len(path.read_text(encoding="utf-8").splitlines()) for path in paths]


def _table(rows: Iterable[tuple[str, int, int]]) -> str:
    return "\n".join(f"  {lines:7,} lines  {files:4} files  {name}" for name, lines, files in rows)


def main() -> None:
    """Print how large the package is, by folder, and what imports go in circles: `python -m tests.style.source_files`."""
    sources = modules()
    nodes = [node for module in sources for node in ast.walk(module.tree)]
    functions = sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes)
    classes = sum(isinstance(node, ast.ClassDef) for node in nodes)
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    sizes = dict(zip(sources, _sizes(module.path for module in sources), strict=True))
    total = sum(sizes.values())
    scripts = [path for path in PACKAGE.rglob("*.js") if "vendor" not in path.parts]
    tests = list((ROOT / "tests").rglob("*.py"))
    share = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in imports) / total
    print(_table([("the package", total, len(sources)), ("JavaScript", sum(_sizes(scripts)), len(scripts))]))
    print(_table([("tests", sum(_sizes(tests)), len(tests))]))
    print(f"\n{functions:,} functions, {classes:,} classes, {share:.1%} of the lines import")
    print(f"{sum(size < 60 for size in sizes.values())} files have fewer than 60 lines")
    print(f"{sum(_mentions_xla(module) for module in sources)} files mention XLA outside of its own")

    print("\nThe package's folders:")
    by_folder: defaultdict[str, list[int]] = defaultdict(list)
    for module, size in sizes.items():
        folders = module.path.relative_to(PACKAGE).parts[:-1]
        by_folder["/".join(folders[: 2 if folders[:1] == ("runtime",) else 1]) or "(top level)"].append(size)
    print(_table((name, sum(found), len(found)) for name, found in sorted(by_folder.items())))

    print("\nFolders of more than 20 files:")
    crowded = Counter(module.path.parent.relative_to(ROOT) for module in sources).most_common()
    print("\n".join(f"  {count:4}  {folder}" for folder, count in crowded if count > 20) or "  none")
    print("\nFiles of more than 600 lines:")
    print(_table((module.name, size, 1) for module, size in sizes.items() if size > 600) or "  none")
    for package in ("accelerate_nb", "accelerate_nb.launching", "accelerate_nb.runtime"):
        pairs = mutual_imports(sources, package)
        print(f"\nParts of {package} that import each other: {len(pairs)}")
        print("".join(f"  {one} and {other}\n" for one, other in pairs), end="")
    found = import_cycles(sources)
    print(f"\nImport cycles, imports in functions and for type checkers included: {len(found)}")
    print("".join(f"  {', '.join(group)}\n" for group in found), end="")


def _mentions_xla(module: Module) -> bool:
    """Whether its code has a name with "xla"; text has none."""
    if "xla" in module.name.replace(".", "_").split("_"):
        return False
    fields = (getattr(node, name, None) for node in ast.walk(module.tree) for name in ("id", "attr", "arg", "name"))
    return any(isinstance(field, str) and "xla" in field.lower() for field in fields)


if __name__ == "__main__":
    main()
