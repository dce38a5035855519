"""Search for IPython's own syntax in a cell, by IPython's own rules."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

CallKind = Literal["line", "system", "getoutput", "usage"]

# The calls that IPython puts in place of its own syntax.
_METHODS: dict[str, CallKind] = {
    "run_line_magic": "line",
    "system": "system",
    "getoutput": "getoutput",
    "show_usage": "usage",
}
_IPYTHON = "get_ipython()"
# `%%time?` shows a help.
_CELL_MAGIC = re.compile(r"%%(?!\w+\?)(?P<name>\S+)(?: (?P<rest>.*))?")
# This is Python too, with another meaning.
_PROMPT = re.compile(r"^(?:\[(?:nav|ins)\])? ?In \[\d+\]: ", re.MULTILINE)
# Python follows as many levels of a statement at the least, on each version and from each place that it is called from.
_DEEPEST = 300
# A cell has as many calls at the most; whatever goes round in circles ends there.
_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class SyntaxPiece:
    """
    One piece of IPython's syntax: it begins after `before` in line `first` and ends with line `last`; lines count from 1.

    `name` is that of a magic, and `text` what follows it, or a command.
    """

    first: int
    last: int
    before: str
    kind: CallKind
    name: str
    text: str
    after: str = ""

    @property
    def is_assigned(self) -> bool:
        """Whether something is done with what it gives."""
        return bool(self.before.strip())

    @property
    def is_inside(self) -> bool:
        """Whether it is in a block of statements."""
        return self.before[:1].isspace()


@dataclass(frozen=True, slots=True)
class FoundCellMagic:
    """A cell magic: its name, its arguments `rest`, and its line, from 1; the cell's text follows it."""

    line: int
    name: str
    rest: str


@dataclass(frozen=True, slots=True)
class ParsedCell:
    """The lines of a cell as IPython reads them, as many as it has, with the pieces of IPython's syntax."""

    lines: tuple[str, ...]
    calls: tuple[SyntaxPiece, ...] = ()
    magic: FoundCellMagic | None = None


def is_python(source: str) -> bool:
    """
    Whether a cell is plain Python for IPython too, so that no search is needed.

    >>> is_python('x = f"{a!r} %time" % b != "?"'), is_python("!ls")
    (True, False)
    """
    return parsed(source) is not None and not _PROMPT.search(source)


def parsed(source: str) -> ast.Module | None:
    """The cell's statements; None if it is no Python."""
    try:
        return _parsed(source)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _parsed(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of the same things when the script runs
        return ast.parse(source)


def is_too_deep(source: str) -> bool:
    """
    Whether a statement has more levels than Python can follow: what it can parse, it may not be able to compile.

    >>> is_too_deep("x = " + "+".join("1" * 1000)), is_too_deep("x = [" + "1," * 1000 + "]")
    (True, False)
    """
    try:
        level: list[ast.AST] = [_parsed(source)]
    except RecursionError:
        return True
    except (SyntaxError, ValueError):
        return False
    depth = 0
    while level and depth <= _DEEPEST:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        depth += 1
    return bool(level)


def found(source: str) -> ParsedCell:
    """
    Read a cell as IPython does.

    >>> found("x = !ls").calls
    (SyntaxPiece(first=1, last=1, before='x = ', kind='getoutput', name='', text='ls', after=''),)
    """
    lines = _cleaned(source.split("\n"))
    magic = cell_magic(lines)
    return transformed(lines) if magic is None else ParsedCell(tuple(lines), magic=magic)


def cell_magic(lines: Sequence[str]) -> FoundCellMagic | None:
    """
    The cell magic of a cell, in its first line that is not empty.

    >>> cell_magic(["%%accelerate -n 2", "print(rank)"])
    FoundCellMagic(line=1, name='accelerate', rest='-n 2')
    """
    number, first = next(((number, line) for number, line in enumerate(lines, start=1) if line.strip()), (1, ""))
    magic = _CELL_MAGIC.fullmatch(first.rstrip())
    return FoundCellMagic(number, magic["name"], magic["rest"] or "") if magic else None


def ipython_calls(tree: ast.Module, source: str) -> Iterator[SyntaxPiece]:
    """Calls of IPython's shell in the user's code: `get_ipython().system("ls")` as a statement, or assigned."""
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Expr, ast.Assign)) or node.lineno != node.end_lineno:
            continue
        value, line = node.value, lines[node.lineno - 1].encode()
        before, after = line[: value.col_offset].decode(), line[value.end_col_offset :].decode()
        call = _call(line[value.col_offset : value.end_col_offset].decode())
        if call is None:
            continue
        name, rest = call.name, call.text
        if call.kind == "line" and not name:
            name, _, rest = rest.lstrip("%").partition(" ")
        yield SyntaxPiece(node.lineno, node.lineno, before, call.kind, name, rest, after)


def _cleaned(lines: Sequence[str]) -> list[str]:
    """The lines without a common indentation and without prompts."""
    from IPython.core.inputtransformer2 import TransformerManager

    begin = next((number for number, line in enumerate(lines) if line.strip()), 0)
    rest = [f"{line}\n" for line in lines[begin:]]
    manager: Any = TransformerManager()  # type: ignore[no-untyped-call] # IPython's own
    for clean in manager.cleanup_transforms:
        cleaner = clean(rest)
        # blank lines at the beginning are gone already; nothing else takes lines away
        rest = cleaner if len(cleaner) == len(rest) else rest
    return [*lines[:begin], *(line.removesuffix("\n") for line in rest)]


def transformed(lines: Sequence[str]) -> ParsedCell:
    """The lines with calls of IPython in place of its syntax; all of them keep their numbers."""
    from IPython.core.inputtransformer2 import TransformerManager

    manager = TransformerManager()  # type: ignore[no-untyped-call] # IPython's own
    now = [f"{line}\n" for line in lines]
    calls: list[SyntaxPiece] = []
    for _ in range(_LIMIT):
        step = _step(manager.token_transformers, now)
        if step is None:
            break
        row, column, then = step
        missing = len(now) - len(then)
        now = [*then[: row + 1], *["#\n"] * missing, *then[row + 1 :]]
        if item := _call(then[row][column:].strip()):
            calls.append(replace(item, first=row + 1, last=row + 1 + missing, before=then[row][:column]))
    return ParsedCell(tuple(line.removesuffix("\n") for line in now), tuple(calls))


def _step(transformers: Sequence[Any], lines: list[str]) -> tuple[int, int, list[str]] | None:
    """The first piece of IPython's syntax is replaced by a call; gives its line and column, from 0, and all lines."""
    from IPython.core.inputtransformer2 import make_tokens_by_line

    tokens = make_tokens_by_line(lines)
    found = filter(None, (transformer.find(tokens) for transformer in transformers))
    for item in sorted(found, key=lambda item: item.sortby()):
        try:
            return item.start_line, item.start_col, item.transform(lines)
        except SyntaxError:
            continue
    return None


def _call(text: str) -> SyntaxPiece | None:
    """The syntax piece for a call of a method of IPython's shell with texts for arguments."""
    tree = parsed(text)
    node = tree.body[0] if tree and len(tree.body) == 1 else None
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return None
    function, arguments = node.value.func, node.value.args
    if not isinstance(function, ast.Attribute) or ast.unparse(function.value) != _IPYTHON or node.value.keywords:
        return None
    texts = [item.value for item in arguments if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    kind = _METHODS.get(function.attr, "line" if function.attr == "magic" else None)
    wanted = {"run_line_magic": 2, "show_usage": 0}.get(function.attr, 1)
    if kind is None or len(texts) != wanted or len(arguments) != wanted:
        return None
    name, argument = ["", "", *texts][-2:] if wanted < 2 else texts
    return SyntaxPiece(1, 1, "", kind, name, argument)
