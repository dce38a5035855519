"""Where IPython's own syntax stands in a cell, found as IPython finds it."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["line", "system", "getoutput", "usage"]

# What IPython calls in the place of its own syntax.
_METHODS: dict[str, Kind] = {
    "run_line_magic": "line",
    "system": "system",
    "getoutput": "getoutput",
    "show_usage": "usage",
}
_IPYTHON = "get_ipython()."
_CELL_MAGIC = re.compile(r"%%(?P<name>\S+)(?: (?P<rest>.*))?")
# This is Python too, with another meaning.
_PROMPT = re.compile(r"^(?:\[(?:nav|ins)\])? ?In \[\d+\]: ", re.MULTILINE)
# Python follows as many levels of a statement at the least, on each version and from each place that it is called from.
_DEEPEST = 300
# A cell has as many calls at the most; whatever goes round in circles ends there.
_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class Call:
    """
    One piece of IPython's syntax: it begins behind `before` in line `first` and ends with line `last`; lines count from 1.

    `name` is that of a magic, and `text` what follows it, or a command.
    """

    first: int
    last: int
    before: str
    kind: Kind
    name: str
    text: str
    after: str = ""

    @property
    def is_assigned(self) -> bool:
        """Whether something is done with what it gives."""
        return bool(self.before.strip())

    @property
    def is_inside(self) -> bool:
        """Whether it stands in a block of statements."""
        return self.before[:1].isspace()


@dataclass(frozen=True, slots=True)
class CellMagic:
    """What stands behind `%%name` in line `line`; the cell's text follows it."""

    line: int
    name: str
    rest: str


@dataclass(frozen=True, slots=True)
class Found:
    """The lines of a cell as IPython reads them, as many as it has, and what IPython would do in Python's place."""

    lines: tuple[str, ...]
    calls: tuple[Call, ...] = ()
    magic: CellMagic | None = None


def is_python(source: str) -> bool:
    """
    Whether a cell is plain Python for IPython too, so that nothing has to be looked for.

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


def found(source: str) -> Found:
    """
    Read a cell as IPython does.

    >>> found("x = !ls").calls
    (Call(first=1, last=1, before='x = ', kind='getoutput', name='', text='ls', after=''),)
    """
    lines = _cleaned(source.split("\n"))
    begin = next((number for number, line in enumerate(lines) if line.strip()), len(lines))
    first = lines[begin] if begin < len(lines) else ""
    magic = _CELL_MAGIC.fullmatch(first.rstrip())
    # `%%time?` asks for help
    if magic and not re.match(r"%%\w+\?", first):
        return Found(tuple(lines), magic=CellMagic(begin + 1, magic["name"], magic["rest"] or ""))
    return _transformed(lines)


def own_calls(tree: ast.Module, source: str) -> Iterator[Call]:
    """What a person wrote as IPython would write it: `get_ipython().system("ls")` as a statement, or assigned."""
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Expr, ast.Assign)) or node.lineno != node.end_lineno:
            continue
        value, line = node.value, lines[node.lineno - 1].encode()
        before, text, after = (
            line[: value.col_offset],
            line[value.col_offset : value.end_col_offset],
            line[value.end_col_offset :],
        )
        call = _call(text.decode())
        if call is None:
            continue
        name, rest = call.name, call.text
        if call.kind == "line" and not name:
            name, _, rest = rest.lstrip("%").partition(" ")
        yield Call(node.lineno, node.lineno, before.decode(), call.kind, name, rest, after.decode())


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


def _transformed(lines: Sequence[str]) -> Found:
    from IPython.core.inputtransformer2 import TransformerManager

    manager = TransformerManager()  # type: ignore[no-untyped-call] # IPython's own
    now = [f"{line}\n" for line in lines]
    calls: list[Call] = []
    for _ in range(_LIMIT):
        step = _step(manager.token_transformers, now)
        if step is None:
            break
        row, then = step
        missing = len(now) - len(then)
        # all lines keep their numbers
        now = [*then[: row + 1], *["#\n"] * missing, *then[row + 1 :]]
        before, found, call = then[row].partition(_IPYTHON)
        if found and (one := _call(found + call.strip())):
            calls.append(replace(one, first=row + 1, last=row + 1 + missing, before=before))
    return Found(tuple(line.removesuffix("\n") for line in now), tuple(calls))


def _step(kinds: Sequence[Any], lines: list[str]) -> tuple[int, list[str]] | None:
    """The first piece of IPython's syntax is replaced by a call; gives its line, from 0, and all lines."""
    from IPython.core.inputtransformer2 import make_tokens_by_line

    tokens = make_tokens_by_line(lines)
    for one in sorted(filter(None, (kind.find(tokens) for kind in kinds)), key=lambda one: one.sortby()):
        try:
            return one.start_line, one.transform(lines)
        except SyntaxError:
            continue
    return None


def _call(text: str) -> Call | None:
    """What a call of a method of IPython's shell, with texts for arguments, stands for."""
    tree = parsed(text)
    node = tree.body[0] if tree and len(tree.body) == 1 else None
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return None
    function, arguments = node.value.func, node.value.args
    if not isinstance(function, ast.Attribute) or ast.unparse(function.value) != _IPYTHON[:-1] or node.value.keywords:
        return None
    texts = [one.value for one in arguments if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    kind = _METHODS.get(function.attr, "line" if function.attr == "magic" else None)
    wanted = {"run_line_magic": 2, "show_usage": 0}.get(function.attr, 1)
    if kind is None or len(texts) != wanted or len(arguments) != wanted:
        return None
    name, argument = ["", "", *texts][-2:] if wanted < 2 else texts
    return Call(1, 1, "", kind, name, argument)
