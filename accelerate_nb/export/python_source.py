"""Python's source as an export changes it: replacements, names and last values, and guards, so that other processes can import it."""

import ast
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, zip_longest

from accelerate_nb.sources.cells import added, kept

# Magics whose text is the notebook's Python.
CODE_MAGICS = frozenset({"time", "capture"})


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """A replacement between two positions; a position is a line, from 1, and a column in bytes of UTF-8, as in `ast`."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


def end_of(node: ast.expr | ast.stmt) -> tuple[int, int]:
    """The end of a node, which `ast.parse` always sets."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def edited(source: str, edits: Iterable[Edit]) -> str:
    """The source after these edits, none of which overlap."""
    lines = [line.encode() for line in source.split("\n")]
    for edit in sorted(edits, reverse=True):
        (first, begin), (last, end) = edit.start, edit.end
        joined = lines[first - 1][:begin] + edit.text.encode() + lines[last - 1][end:]
        lines[first - 1 : last] = joined.split(b"\n")
    return b"\n".join(lines).decode()


# Statements whose body is no part of the cell's own run.
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class ModuleNames:
    """The module's names that statements use while they run, without what runs only when a function of theirs is called."""

    # `bound`: given a value, or taken away; `read`: looked up; `called`: those of `read` that they call or decorate with

    def __init__(self, nodes: Iterable[ast.AST]) -> None:
        self.bound: set[str] = set()
        self.read: set[str] = set()
        self.called: set[str] = set()
        for node in nodes:
            for part in with_texts(node):
                self._visit(part)

    def _visit(self, node: ast.AST) -> None:
        name = getattr(node, "rest", None) or getattr(node, "name", None)
        if isinstance(node, ast.Name):
            (self.read if isinstance(node.ctx, ast.Load) else self.bound).add(node.id)
        elif isinstance(node, ast.alias):
            self.bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(name, str):
            # of a function, a class, an error that is handled, or a part of a pattern
            self.bound.add(name)
        self.called |= _names(
            [*getattr(node, "decorator_list", ()), *([node.func] if isinstance(node, ast.Call) else ())]
        )
        if isinstance(node, _COMPREHENSIONS):
            # its targets are its own, unlike what `:=` binds anywhere in it, and the first values come from outside of it
            self._add(ast.iter_child_nodes(node), _names(item.target for item in node.generators))
            self._visit(node.generators[0].iter)
            return
        later = [node.body] if isinstance(node, ast.Lambda) else node.body if isinstance(node, _LATER) else []
        if isinstance(node, ast.ClassDef):
            # what its body binds is its own, so it hides nothing of the module: only names from outside are wanted here
            self._add(node.body, ModuleNames(node.body).bound)
        for child in ast.iter_child_nodes(node):
            # annotations are looked up with the definition, up to Python 3.13
            if child not in later:
                self._visit(child)

    def _add(self, nodes: Iterable[ast.AST], own: set[str]) -> None:
        """Add the names of nodes that have names of their own."""
        inside = ModuleNames(nodes)
        self.bound |= inside.bound - own
        self.read |= inside.read - own
        self.called |= inside.called - own


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {item.id for node in nodes for item in ast.walk(node) if isinstance(item, ast.Name)}


def with_texts(node: ast.AST) -> Iterator[ast.AST]:
    """A statement, and the code in texts that it gives a magic to run."""
    yield node
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or ast.unparse(call.func) not in {"nb_shell.line", "nb_shell.cell"}:
            continue
        name, *texts = (str(part.value) if isinstance(part, ast.Constant) else "" for part in call.args)
        words = texts[0].split()
        # the name of what it captures, and the names of what it fetches
        given = words if name == "capture" else words[1:] if name == "accelerate" and words[:1] == ["pull"] else []
        is_code = name in CODE_MAGICS or (name == "accelerate" and {"--local", "--also-here"} & {*words})
        with suppress(SyntaxError):
            yield from ast.parse("\n".join(f"{word} = None" for word in given if word.isidentifier())).body
        with suppress(SyntaxError):
            yield from ast.parse(texts[-1]).body if is_code else ()


def mentioned(nodes: Iterable[ast.stmt]) -> set[str]:
    """Every name that is looked up anywhere in statements, now or when a function of them is called."""
    parts = (item for node in nodes for part in with_texts(node) for item in ast.walk(part))
    return {item.id for item in parts if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load)}


# They give nothing back that a notebook would show.
_SILENT = frozenset({"print", "display", "plt.show", "pyplot.show", "nb_shell.shown", "nb_shell.run"})
_SILENT_CELLS = frozenset({"accelerate", "bash", "capture", "file", "script", "sh", "writefile"})


def result_of(source: str, cell: str = "") -> ast.Expr | None:
    """The expression whose value a notebook shows: the last statement, unless a semicolon follows it."""
    # `cell` is what the source was made of, line by line: an expression that came before a magic shows nothing
    body = ast.parse(source).body
    last = body[-1] if body else None
    if not isinstance(last, ast.Expr) or (isinstance(last.value, ast.Constant) and last.value.value is None):
        return None
    if isinstance(call := last.value, ast.Call):
        function = ast.unparse(call.func)
        magic = call.args[0].value if function == "nb_shell.cell" and isinstance(call.args[0], ast.Constant) else None
        if function in _SILENT or magic in _SILENT_CELLS:
            return None
    line, column = end_of(last)
    if any(text.strip() and not text.lstrip().startswith("#") for text in cell.split("\n")[line:]):
        return None
    after = source.split("\n")[line - 1].encode()[column:]
    return None if after.lstrip().startswith(b";") else last


def around(node: ast.expr | ast.stmt, opening: str, closing: str) -> list[Edit]:
    """The edits that put these texts before and after a node."""
    start, end = (node.lineno, node.col_offset), end_of(node)
    return [Edit(start, start, opening), Edit(end, end, closing)]


def hoisted(source: str) -> tuple[str, tuple[str, ...]]:
    """A cell without its imports from the future, on as many lines, and the names that it imports from there."""
    imports = (node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom))
    found = [node for node in imports if node.module == "__future__"]
    names = tuple(alias.name for node in found for alias in node.names)
    lines = ["\n" * (end_of(node)[0] - node.lineno) + "pass" for node in found]
    edits = [Edit((node.lineno, node.col_offset), end_of(node), text) for node, text in zip(found, lines, strict=True)]
    return edited(source, edits), names


# --------------------------------------------------------------------------------------- what is run by the script alone

_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Global, ast.Pass)
_OF_NAMES = (ast.Name, ast.Tuple, ast.List, ast.expr_context)
# Calls that make a value of what they are given, and do nothing else.
_MAKERS = frozenset(
    f"{home}{name}"
    for homes, names in (
        (("", "typing."), ("TypeVar", "ParamSpec", "TypeVarTuple", "NewType", "NamedTuple", "TypedDict")),
        (("", "collections."), ("namedtuple", "OrderedDict", "defaultdict", "Counter", "deque")),
        (("", "pathlib."), ("Path", "PurePath")),
        (("", "functools."), ("partial",)),
        (("logging.",), ("getLogger",)),
        (("torch.",), ("device",)),
        (("re.",), ("compile",)),
        (("os.",), ("getenv", "environ.get", "path.join", "path.expanduser")),
        (("",), ("dict", "list", "tuple", "set", "frozenset", "range", "len", "int", "float", "str", "bool")),
    )
    for home in homes
    for name in names
)
_WORK = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class DefinitionFinder:
    """Decides, for one statement after the other, whether it only defines."""

    # a definition that needs what only a guarded statement computes (`class Net(Base): size = len(vocabulary)`) can't
    # be run by a process that merely imports the script, so it is guarded as well

    guarded: set[str] = field(default_factory=set)
    _imported: set[str] = field(default_factory=set)
    _inside: dict[str, set[str]] = field(default_factory=dict)

    def only_define(self, nodes: Sequence[ast.stmt], *, shown: ast.stmt | None = None) -> bool:
        """Whether these statements, which stand on the same lines, all define; they are remembered."""
        names = ModuleNames(nodes)
        needed = names.read.union(self._within(names.called))
        defines = all(node is not shown and _defines(node) for node in nodes) and self.guarded.isdisjoint(needed)
        # imports that share a line with what is guarded are written above it once more
        imported = ModuleNames(_imports(nodes)).bound
        self._imported |= imported
        changed = set() if defines else _changed(nodes) - self._imported
        self.guarded = (self.guarded | names.bound | changed) - (names.bound if defines else imported)
        for node in nodes:
            if isinstance(node, _LATER):
                self._inside[node.name] = mentioned([node])
        return defines

    def _within(self, names: Iterable[str]) -> Iterator[str]:
        """The names that these functions, and the functions that they call, look up when they are called."""
        waiting, known = list(names), set[str]()
        while waiting:
            name = waiting.pop()
            if name not in known:
                known.add(name)
                yield from self._inside.get(name, ())
                waiting += self._inside.get(name, ())


def _changed(nodes: Iterable[ast.AST]) -> set[str]:
    """The names of values that statements may change: they assign parts of them, or call their methods."""
    found: set[str] = set()
    for part in (part for node in nodes for part in ast.walk(node)):
        place = part.func if isinstance(part, ast.Call) else part
        if isinstance(part, ast.Call) or not isinstance(getattr(part, "ctx", ast.Load()), ast.Load):
            while isinstance(place, (ast.Attribute, ast.Subscript)):
                place = place.value
                found |= {place.id} if isinstance(place, ast.Name) else set()
    return found


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, _DEFINITIONS) or type(node).__name__ == "TypeAlias":
        return True
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        are_names = all(isinstance(part, _OF_NAMES) for target in targets for part in ast.walk(target))
        return are_names and (node.value is None or _is_at_hand(node.value))
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        is_guard = any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test))
        return _is_at_hand(node.test) and not is_guard and all(map(_defines, (*node.body, *node.orelse)))
    if isinstance(node, ast.Try):
        handled = (part for handler in node.handlers for part in handler.body)
        return all(map(_defines, (*node.body, *handled, *node.orelse, *node.finalbody)))
    return False


def _is_at_hand(value: ast.expr) -> bool:
    """Whether a value takes no work to make."""
    return not any(
        isinstance(part, _WORK) or (isinstance(part, ast.Call) and ast.unparse(part.func) not in _MAKERS)
        for part in _parts(value)
    )


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    children = node.args.defaults if isinstance(node, ast.Lambda) else ast.iter_child_nodes(node)
    for child in children:
        yield from _parts(child)


# They need a loop that runs, which a notebook always has.
_NEEDS_LOOP = frozenset({"create_task", "ensure_future", "get_running_loop"})


def is_async(nodes: Sequence[ast.stmt]) -> bool:
    """Whether these statements can only run where a loop does."""
    now = (part for node in nodes if not isinstance(node, _LATER) for part in ast.walk(node))
    called = (ast.unparse(part.func).rpartition(".")[2] for part in now if isinstance(part, ast.Call))
    code = compile(ast.Module(list(nodes), []), "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return bool(code.co_flags & inspect.CO_COROUTINE) or any(name in _NEEDS_LOOP for name in called)


def with_global_annotations(source: str) -> str:
    """An asynchronous cell with parentheses around annotated names: `(x): int = await f()`."""
    # a function can't annotate what it declares global otherwise
    body = ast.parse(source).body
    if not any(is_async([node]) for node in body):
        return source
    return edited(source, [edit for node in body for edit in _parentheses(node)])


def _parentheses(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, (*_LATER, ast.Lambda)):
        return
    if isinstance(node, ast.AnnAssign) and node.simple:
        yield from around(node.target, "(", ")")
    for child in ast.iter_child_nodes(node):
        yield from _parentheses(child)


GUARD = 'if __name__ == "__main__":'
INDENT = "    "


def guarded(source: str, number: int, definitions: DefinitionFinder, *, shown: bool = False) -> list[str]:
    """The lines of a script for a cell's source; `shown` means that its last statement shows something, even a constant."""
    layout = _ScriptLayout(source, number)
    body = layout.tree.body
    last = body[-1] if shown and body else None
    for defines, run in groupby(
        _groups(body, layout.lines), key=lambda nodes: definitions.only_define(nodes, shown=last)
    ):
        if defines:
            layout.write(end_of([*run][-1][-1])[0])
        else:
            layout.write_guarded([*run])
    layout.write(len(layout.lines))
    return layout.written


def _groups(body: Sequence[ast.stmt], lines: Sequence[str]) -> Iterator[list[ast.stmt]]:
    """The statements that share lines, or lines that a backslash joins, together."""
    together: list[ast.stmt] = []
    for node, following in zip_longest(body, body[1:]):
        together.append(node)
        last = end_of(node)[0]
        if following is None or (_first(following) > last and not lines[last - 1].endswith("\\")):
            yield together
            together = []


def _first(node: ast.stmt) -> int:
    """The line where a statement begins, with its decorators."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _imports(nodes: Iterable[ast.stmt]) -> list[ast.stmt]:
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]


class _ScriptLayout:
    """The lines of one cell, written one run of statements after the other."""

    def __init__(self, source: str, number: int) -> None:
        self.tree = ast.parse(source)
        self.lines = source.split("\n")
        self.written: list[str] = []
        self._number = number
        self._done = 0
        self._functions = 0
        # the first and last lines of texts: what of a line is in a text is part of it, to the first and the last column
        texts = [*_texts(self.tree)]
        self._begin_in_text = {line for first, last in texts for line in range(first + 1, last + 1)}
        self._end_in_text = {line for first, last in texts for line in range(first, last)}

    def write(self, last: int, indent: str = "") -> None:
        """Write the lines up to `last`."""
        for line in range(self._done + 1, last + 1):
            text = self.lines[line - 1]
            if text.strip() and line not in self._begin_in_text:
                text = indent + text
            self.written.append(text if line in self._end_in_text else kept(text))
        self._done = max(self._done, last)

    def write_guarded(self, run: Sequence[Sequence[ast.stmt]]) -> None:
        """Write statements, with the comments right above them, below a guard."""
        line = _first(run[0][0]) - 1
        while line > self._done and self.lines[line - 1].lstrip().startswith("#"):
            line -= 1
        self.write(line)
        nodes = [node for group in run for node in group]
        last = end_of(nodes[-1])[0]
        # definitions below may need these
        self.written += [added(ast.unparse(node)) for node in _imports(nodes)]
        if not is_async(nodes):
            self.written.append(added(GUARD))
            self.write(last, INDENT)
            return
        self._functions += 1
        function = f"_cell_{self._number}" + (f"_{self._functions}" if self._functions > 1 else "")
        self.written.append(added(f"async def {function}():"))
        # it assigns names of the script
        if names := ModuleNames(nodes).bound - {"*"}:
            self.written.append(added(f"{INDENT}global {', '.join(sorted(names))}"))
        self.write(last, INDENT)
        self.written += [added(GUARD), added(f"{INDENT}nb_shell.wait({function}())")]


_OF_PIECES = (ast.JoinedStr,) + ((ast.TemplateStr,) if hasattr(ast, "TemplateStr") else ())


def _texts(node: ast.AST) -> Iterator[tuple[int, int]]:
    """The first and last lines of texts, whole ones: Python 3.10 doesn't know where the parts of an f-string stand."""
    if isinstance(node, _OF_PIECES) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))):
        yield node.lineno, end_of(node)[0]
        return
    for child in ast.iter_child_nodes(node):
        yield from _texts(child)
