"""Python code that replaces a piece of IPython's syntax: an expression or a statement."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from string import Formatter

from accelerate_nb.export.ipython.find import parsed
from accelerate_nb.export.translated_cell import ExportOptions, PlainCell

# Names that a notebook hardly has itself, unlike `run` and `shell`.
SHELL = "from accelerate_nb.script import shell_commands as nb_shell"
IPYTHON = "from accelerate_nb.script import ipython as nb_ipython"
TIMING = "from accelerate_nb.script import timeit as nb_timing"

_DOLLAR = re.compile(r"\$\$?[\w.]")
# Braces that a shell, and what it calls, have a use for, too.
_NOT_PYTHONS = re.compile(r"['$%@\\]")
_SURE = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.BinOp, ast.Constant, ast.IfExp)


@dataclass(frozen=True, slots=True)
class MagicCall:
    """
    A magic or a command, and its position.

    `plain` translates the code in it. `is_assigned` means that its value is used, `is_inside` that it is in a
    block, `on_ranks` that every process is meant to do it.
    """

    name: str
    text: str
    export_options: ExportOptions
    plain: Callable[[str], PlainCell]
    is_assigned: bool = False
    is_inside: bool = False
    on_ranks: bool = False

    @property
    def names(self) -> str:
        """An expression for the names that can be seen there."""
        return "{**globals(), **locals()}" if self.is_inside else "globals()"

    @property
    def every(self) -> str:
        """The last argument of what one process of each machine does, except where every process is meant to."""
        return ", every=True" if self.on_ranks else ""


@dataclass(frozen=True, slots=True)
class Replacement:
    """
    Python code that replaces a magic.

    Without `text` the magic is left out; `note` gives the reason, if there is one. A `problem` keeps the notebook from
    being exported.
    """

    text: str | None = None
    imports: tuple[str, ...] = ()
    note: str | None = None
    problem: str | None = None


def left_out(name: str, why: str) -> Replacement:
    """The magic is left out, with a note."""
    return Replacement(note=f"{' '.join(name.split())} was left out: {why}")


def refused(name: str, why: str) -> Replacement:
    """The magic can't be in a script."""
    return Replacement(problem=f"{name} {why}. Tag the cell `skip-script`, or write it as Python.")


def through_ipython(call: MagicCall) -> Replacement:
    """IPython itself runs the line magic, when the script runs."""
    return Replacement(f"nb_ipython.line_magic({quoted(call.name)}, {quoted(call.text)}, globals())", (IPYTHON,))


def quoted(text: str) -> str:
    r"""
    A text as it is written in Python.

    >>> print(quoted('say "a"'), quoted("it's"))
    'say "a"' "it's"
    """
    mark = "'" if '"' in text and "'" not in text else '"'
    return mark + "".join(_written(item, mark) for item in text) + mark


def expression(text: str, call: MagicCall) -> tuple[str, tuple[str, ...]]:
    """
    A text with IPython's `{expression}` and `$name` as an expression, and its imports.

    It is an f-string where Python's names are surely meant, as in `cp {path} data`. Where the shell may be meant instead, as
    in `echo $HOME` and `mkdir {a,b}`, the script decides as IPython does: whatever has no value in Python is left alone.
    """
    if not _DOLLAR.search(text):
        try:
            pieces = [*Formatter().parse(text)]
        except ValueError:
            return quoted(text), ()  # IPython leaves it alone
        fields = [field + (f":{spec}" if spec else "") for _, field, spec, _ in pieces if field is not None]
        if any(parsed(f"({field.strip()}\n)") is None or not field.strip() for field in fields):
            return quoted(text), ()  # and this
        if not fields:
            return quoted("".join(literal for literal, *_ in pieces)), ()
        written = _f_string(text, pieces)
        if written is not None:
            return written, ()
    return f"nb_shell.expanded({quoted(text)}, {call.names})", (SHELL,)


def is_fixed(text: str) -> bool:
    """Whether a text has nothing in it that IPython would replace."""
    return not re.search(r"[{}]", text) and not _DOLLAR.search(text)


def as_text(lines: list[str]) -> tuple[str, list[str]]:
    r"""
    Lines as a text that is written on the same lines: what opens it on the line above them, and they with what closes it.

    >>> [as_text(["a", "b"])[0] + " ...", *as_text(["a", "b"])[1]] == ['""' + '"\ ...', "a", 'b""' + '"']
    True
    """
    body = "\n".join(lines)
    for mark in ('"""', "'''"):
        if mark not in body and not body.endswith((mark[0], "\\")):
            if "\\" not in body:
                return mark + "\\", [*lines[:-1], lines[-1] + mark]
            # a raw text can't leave its first line break out
            return "r" + mark, [*lines[:-1], f"{lines[-1]}{mark}[1:]"]
    escaped = [line.replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    return '"""\\', [*escaped[:-1], escaped[-1] + '"""']


def _written(text: str, mark: str) -> str:
    if text in {"\\", mark}:
        return "\\" + text
    return text if text.isprintable() else repr(text)[1:-1]


def _f_string(text: str, pieces: list[tuple[str, str | None, str | None, str | None]]) -> str | None:
    if _NOT_PYTHONS.search(text):
        return None
    mark = '"' if '"' not in text else "'"
    written = []
    for literal, field, spec, conversion in pieces:
        written.append("".join(_written(item, mark) for item in literal).replace("{", "{{").replace("}", "}}"))
        if field is None:
            continue
        tree = parsed(field.strip())
        node = tree.body[0] if tree and len(tree.body) == 1 else None
        is_sure = isinstance(node, ast.Expr) and isinstance(node.value, _SURE)
        if spec or not is_sure or mark in field or field.startswith("{") or conversion not in {None, "r", "s", "a"}:
            return None
        written.append("{" + field + (f"!{conversion}" if conversion else "") + "}")
    return f"f{mark}{''.join(written)}{mark}"
