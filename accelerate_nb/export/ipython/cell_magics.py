"""Cell magics, on as many lines: `%%time`, `%%bash`, `%%writefile` and `%%capture` as Python; IPython runs the rest."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accelerate_nb.export.edits import Edit, begin_inside, edited, end_of
from accelerate_nb.export.ipython.find import parsed
from accelerate_nb.export.ipython.line_magics import INTERACTIVE
from accelerate_nb.export.ipython.pip import WHY, only_installs
from accelerate_nb.export.ipython.replacements import (
    IPYTHON,
    SHELL,
    TIMING,
    MagicCall,
    Replacement,
    as_text,
    expression,
    left_out,
    quoted,
    refused,
)
from accelerate_nb.export.last_value import showing
from accelerate_nb.export.translated_cell import PlainCell, Remark

CAPTURE = "from IPython.utils.capture import capture_output"
_PROGRAMS = ("bash", "perl", "pypy", "python", "python2", "python3", "ruby", "sh")
_SHOWN = ("html", "HTML", "javascript", "js", "latex", "markdown", "svg", "SVG")
_DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


@dataclass(frozen=True, slots=True)
class CellMagicCode:
    """The Python code of a cell magic: its own line, `opening`, and the lines below it."""

    opening: str
    lines: Sequence[str]
    imports: tuple[str, ...] = ()
    notes: tuple[Remark, ...] = ()  # of the lines below, which count from 1


def cell(call: MagicCall, lines: list[str]) -> CellMagicCode | Replacement:
    """
    The translation of a cell magic; one for a person at a page is left out, or refused.

    `call` is the magic's own line, `lines` are those below it.
    """
    if not any(line.strip() for line in lines):
        return refused(f"%%{call.name}", "has nothing below it")
    if call.name in _SHOWN:
        return left_out(f"%%{call.name}", "it only shows something in a notebook.")
    if call.name in INTERACTIVE:
        return refused(f"%%{call.name}", "means nothing outside of a notebook")
    return _HANDLERS.get(call.name, _through_ipython)(call, lines)


def was(call: MagicCall) -> str:
    """A comment for a magic's line; editors take what begins with `# %%` for a cell."""
    return f"# was: %%{call.name} {call.text}".rstrip()


def _time(call: MagicCall, lines: list[str]) -> CellMagicCode | Replacement:
    if re.sub(r"--no-raise-error", "", call.text).strip():
        return refused("%%time", "takes no statement in its own line when there is code below it")
    inner = call.plain("\n".join(lines))
    tree = parsed(inner.source)
    if inner.problems or tree is None or not tree.body or isinstance(tree.body[-1], _DEFINING):
        return _as_it_is(call, inner)
    last = tree.body[-1]
    imports = (TIMING, *inner.imports)
    if hasattr(last, "body") or hasattr(last, "cases"):
        # nothing can follow it on its own lines
        below = indented(inner.source).split("\n")
        return CellMagicCode("with nb_timing.Clock():", below, imports, inner.notes)
    if isinstance(last, ast.Expr):
        # the cell shows its value, so it stays last
        edits = showing(last, "nb_clock.told")
    else:
        edits = [Edit(end_of(last), end_of(last), "; nb_clock.told()")]
    return CellMagicCode("nb_clock = nb_timing.Clock()", edited(inner.source, edits).split("\n"), imports, inner.notes)


def _capture(call: MagicCall, lines: list[str]) -> CellMagicCode | Replacement:
    inner = call.plain("\n".join(lines))
    tree = parsed(inner.source)
    if inner.problems or tree is None or all(isinstance(node, _DEFINING) for node in tree.body):
        return _as_it_is(call, inner)
    words = call.text.split()
    names = [word for word in words if word.isidentifier()]
    flags = [word for word in words if word in {"--no-stdout", "--no-stderr", "--no-display"}]
    arguments = ", ".join(f"{flag[5:]}=False" for flag in flags)
    target = f" as {names[0]}" if names else ""
    below = indented(inner.source).split("\n")
    return CellMagicCode(f"with capture_output({arguments}){target}:", below, (CAPTURE, *inner.imports), inner.notes)


def _written(call: MagicCall, lines: list[str]) -> CellMagicCode | Replacement:
    words = call.text.split()
    append = bool({"-a", "--append"} & {*words})
    path = re.sub(r"""^(['"])(.*)\1$""", r"\2", " ".join(word for word in words if word not in {"-a", "--append"}))
    if not path:
        return _through_ipython(call, lines)
    text, imports = expression(path, call)
    last = (", append=True" if append else "") + call.every
    return _with_text(f"nb_shell.write_file({text}, ", lines, f"{last})", (SHELL, *imports))


def _script(call: MagicCall, lines: list[str]) -> CellMagicCode | Replacement:
    try:
        flags, words = _script_options(shlex.split(call.text))
    except ValueError:
        return _through_ipython(call, lines)
    program = words if call.name == "script" else [call.name, *words]
    if call.name in {"bash", "sh"} and only_installs("\n".join(lines)) and not call.export_options.keep_installs:
        return left_out(f"%%{call.name}", WHY)
    if not program or ("bg" in flags and flags.keys() & {"out", "err", "proc"}):
        return _through_ipython(call, lines)
    text, imports = expression(" ".join(_shell_word(word) for word in program), call)
    fails = ", fails=False" if "no-raise-error" in flags else ""
    if names := [flags[name] for name in ("out", "err") if name in flags]:
        keep = "both" if len(names) == 2 else next(name for name in ("out", "err") if name in flags)
        last = (f', "{keep}"' if keep != "out" else "") + fails
        return _with_text(f"{', '.join(names)} = nb_shell.output_of({text}, ", lines, f"{last})", (SHELL, *imports))
    last = fails + (", background=True" if "bg" in flags else "") + call.every
    return _with_text(f"nb_shell.cell({text}, ", lines, f"{last})", (SHELL, *imports))


def _system(_: MagicCall, lines: list[str]) -> CellMagicCode | Replacement:
    return _with_text("nb_shell.capture(", lines, ")", (SHELL,))


def _through_ipython(call: MagicCall, lines: list[str]) -> CellMagicCode:
    opening = f"nb_ipython.cell_magic({quoted(call.name)}, {quoted(call.text)}, "
    return _with_text(opening, lines, ", globals())", (IPYTHON,))


def indented(source: str) -> str:
    r"""
    Statements one block deeper; texts over several lines stay what they are.

    >>> print(indented("for x in y:\n    f(x)"))
        for x in y:
            f(x)
    """
    inside = begin_inside(ast.parse(source))
    lines = source.split("\n")
    return "\n".join(
        f"    {text}" if text.strip() and number not in inside else text for number, text in enumerate(lines, start=1)
    )


def _as_it_is(call: MagicCall, inner: PlainCell) -> CellMagicCode:
    """The code below a magic that has nothing to do with it."""
    if inner.problems:
        # the caller knows the line of the problem
        raise UntranslatableCode(inner.problems)
    return CellMagicCode(was(call), inner.source.split("\n"), inner.imports, inner.notes)


class UntranslatableCode(Exception):  # noqa: N818 - no error of the program
    """The code below a cell magic can't be translated; `problems` counts its lines from 1."""

    def __init__(self, problems: tuple[Remark, ...]) -> None:
        super().__init__(problems)
        self.problems = problems


def _with_text(opening: str, lines: list[str], closing: str, imports: tuple[str, ...]) -> CellMagicCode:
    mark, below = as_text(lines)
    return CellMagicCode(opening + mark, [*below[:-1], below[-1] + closing], tuple(dict.fromkeys(imports)))


def _script_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    flags: dict[str, str] = {}
    rest: list[str] = []
    waiting = iter(words)
    for word in waiting:
        name, given, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in {"out", "err", "bg", "proc", "no-raise-error"}:
            rest.append(word)
        elif name in {"bg", "no-raise-error"}:
            flags[name] = ""
        else:
            flags[name] = value if given else next(waiting, "")
    return flags, rest


def _shell_word(word: str) -> str:
    """A word as a shell has it, with what IPython replaces left as it is."""
    return word if re.fullmatch(r"[\w@%+=:,./{}$-]+", word) else shlex.quote(word)


_HANDLERS: dict[str, Callable[[MagicCall, list[str]], CellMagicCode | Replacement]] = {
    **dict.fromkeys((*_PROGRAMS, "script"), _script),
    **dict.fromkeys(("!", "sx", "system"), _system),
    **dict.fromkeys(("file", "writefile"), _written),
    "capture": _capture,
    "time": _time,
}
