"""Cell magics as Python, on as many lines: `%%time`, `%%bash`, `%%writefile` and the others that mean something in a script."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from accelerate_nb.export.calls import parsed
from accelerate_nb.export.editing import Edit, edited, end_of
from accelerate_nb.export.installing import WHY, only_installs
from accelerate_nb.export.line_magics import MEASURING, timeit_options
from accelerate_nb.export.plain import Plain, Remark
from accelerate_nb.export.results import showing
from accelerate_nb.export.saying import (
    SHELL,
    TIMING,
    Asked,
    Said,
    as_text,
    expression,
    left_out,
    options,
    quoted,
    refused,
)
from accelerate_nb.export.texts import begin_inside

CAPTURE = "from IPython.utils.capture import capture_output"
_PROGRAMS = ("bash", "perl", "pypy", "python", "python2", "python3", "ruby", "sh")
_SHOWN = ("html", "HTML", "javascript", "js", "latex", "markdown", "svg", "SVG")
_DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


@dataclass(frozen=True, slots=True)
class Below:
    """What a cell magic makes of its own line, `opening`, and of the lines below it."""

    opening: str
    lines: Sequence[str]
    imports: tuple[str, ...] = ()
    notes: tuple[Remark, ...] = ()  # of the lines below, which count from 1


def cell(asked: Asked, lines: list[str]) -> Below | Said:
    """
    What a cell magic is in Python; what says nothing is left out, or refused.

    `asked` is the magic's own line, `lines` are those below it.
    """
    if not any(line.strip() for line in lines):
        return refused(f"%%{asked.name}", "has nothing below it")
    if asked.name in _SHOWN:
        return left_out(f"%%{asked.name}", "it only shows something to whoever sits at a notebook.")
    handler = _HANDLERS.get(asked.name)
    if handler is None:
        return refused(f"%%{asked.name}", "means nothing outside of a notebook")
    return handler(asked, lines)


def was(asked: Asked) -> str:
    """A comment for a magic's line; editors take what begins with `# %%` for a cell."""
    return f"# was: %%{asked.name} {asked.text}".rstrip()


def _time(asked: Asked, lines: list[str]) -> Below | Said:
    if re.sub(r"--no-raise-error", "", asked.text).strip():
        return refused("%%time", "takes no statement in its own line when there is code below it")
    inner = asked.plain("\n".join(lines))
    tree = parsed(inner.source)
    if inner.problems or tree is None or not tree.body or isinstance(tree.body[-1], _DEFINING):
        return _as_it_is(asked, inner)
    last = tree.body[-1]
    imports = (TIMING, *inner.imports)
    if hasattr(last, "body") or hasattr(last, "cases"):
        # nothing can follow it on its own lines
        below = indented(inner.source).split("\n")
        return Below("with nb_timing.Clock():", below, imports, inner.notes)
    if isinstance(last, ast.Expr):
        # the cell shows its value, so it stays last
        edits = showing(last, "nb_clock.told")
    else:
        edits = [Edit(end_of(last), end_of(last), "; nb_clock.told()")]
    return Below("nb_clock = nb_timing.Clock()", edited(inner.source, edits).split("\n"), imports, inner.notes)


def _timeit(asked: Asked, lines: list[str]) -> Below | Said:
    said, setup = options(asked.text, "n:r:tcp:qov:")
    code, first = asked.plain("\n".join(lines)), asked.plain(setup)
    if problems := (*code.problems, *first.problems):
        return Said(problem=problems[0].text)
    function = "measured" if said.keys() & {"o", "v"} else "timeit"
    target = f"{said['v']} = " if "v" in said else ""
    opening, below = as_text(code.source.split("\n"))
    before = [f"setup={quoted(first.source.strip())}"] if setup.strip() else []
    rest = ", ".join([asked.names, *before, *timeit_options(said)])
    imports = (TIMING, *code.imports, *first.imports)
    return Below(f"{target}nb_timing.{function}({opening}", _closed(below, f", {rest})"), imports, code.notes)


def _capture(asked: Asked, lines: list[str]) -> Below | Said:
    inner = asked.plain("\n".join(lines))
    tree = parsed(inner.source)
    if inner.problems or tree is None or all(isinstance(node, _DEFINING) for node in tree.body):
        return _as_it_is(asked, inner)
    words = asked.text.split()
    names = [word for word in words if word.isidentifier()]
    said = ", ".join(f"{word[5:]}=False" for word in words if word in {"--no-stdout", "--no-stderr", "--no-display"})
    target = f" as {names[0]}" if names else ""
    below = indented(inner.source).split("\n")
    return Below(f"with capture_output({said}){target}:", below, (CAPTURE, *inner.imports), inner.notes)


def _measuring(asked: Asked, lines: list[str]) -> Below | Said:
    _, code = options(asked.text, MEASURING[asked.name])
    inner, first = asked.plain("\n".join(lines)), asked.plain(code)
    note = Remark(0, f"%%{asked.name} measures nothing in a script: its code runs as it is.")
    imports = tuple(dict.fromkeys((*first.imports, *inner.imports)))
    below = _as_it_is(asked, inner)
    if isinstance(below, Said):
        return below
    opening = first.source if code.strip() else below.opening
    return replace(below, opening=opening, imports=imports, notes=(note, *inner.notes))


def _written(asked: Asked, lines: list[str]) -> Below | Said:
    words = asked.text.split()
    append = bool({"-a", "--append"} & {*words})
    path = re.sub(r"""^(['"])(.*)\1$""", r"\2", " ".join(word for word in words if word not in {"-a", "--append"}))
    if not path:
        return refused(f"%%{asked.name}", "names no file")
    text, imports = expression(path, asked)
    last = (", append=True" if append else "") + asked.every
    return _with_text(f"nb_shell.write_file({text}, ", lines, f"{last})", (SHELL, *imports))


def _script(asked: Asked, lines: list[str]) -> Below | Said:
    try:
        said, words = _script_options(shlex.split(asked.text))
    except ValueError as error:
        return refused(f"%%{asked.name}", f"can't be read ({error})")
    program = words if asked.name == "script" else [asked.name, *words]
    if not program:
        return refused("%%script", "names no program")
    if asked.name in {"bash", "sh"} and only_installs("\n".join(lines)) and not asked.wishes.keep_installs:
        return left_out(f"%%{asked.name}", WHY)
    if "bg" in said and said.keys() & {"out", "err", "proc"}:
        return refused(f"%%{asked.name} --bg", "gives a pipe of a program that runs on")
    text, imports = expression(" ".join(_shell_word(word) for word in program), asked)
    fails = ", fails=False" if "no-raise-error" in said else ""
    if names := [said[name] for name in ("out", "err") if name in said]:
        keep = "both" if len(names) == 2 else next(name for name in ("out", "err") if name in said)
        last = (f', "{keep}"' if keep != "out" else "") + fails
        return _with_text(f"{', '.join(names)} = nb_shell.output_of({text}, ", lines, f"{last})", (SHELL, *imports))
    last = fails + (", background=True" if "bg" in said else "") + asked.every
    return _with_text(f"nb_shell.cell({text}, ", lines, f"{last})", (SHELL, *imports))


def _system(_: Asked, lines: list[str]) -> Below | Said:
    return _with_text("nb_shell.capture(", lines, ")", (SHELL,))


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


def _as_it_is(asked: Asked, inner: Plain) -> Below | Said:
    """The code below a magic that has nothing to do with it."""
    if inner.problems:
        # the line of the problem is known to who asked
        raise Unsayable(inner.problems)
    return Below(was(asked), inner.source.split("\n"), inner.imports, inner.notes)


class Unsayable(Exception):  # noqa: N818 - no error of the program
    """The code below a cell magic can't be said; `problems` counts its lines from 1."""

    def __init__(self, problems: tuple[Remark, ...]) -> None:
        super().__init__(problems)
        self.problems = problems


def _with_text(opening: str, lines: list[str], closing: str, imports: tuple[str, ...]) -> Below:
    mark, below = as_text(lines)
    return Below(opening + mark, _closed(below, closing), tuple(dict.fromkeys(imports)))


def _closed(lines: Sequence[str], closing: str) -> list[str]:
    return [*lines[:-1], lines[-1] + closing]


def _script_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    said: dict[str, str] = {}
    rest: list[str] = []
    waiting = iter(words)
    for word in waiting:
        name, given, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in {"out", "err", "bg", "proc", "no-raise-error"}:
            rest.append(word)
        elif name in {"bg", "no-raise-error"}:
            said[name] = ""
        else:
            said[name] = value if given else next(waiting, "")
    return said, rest


def _shell_word(word: str) -> str:
    """A word as a shell has it, with what IPython replaces left as it is."""
    return word if re.fullmatch(r"[\w@%+=:,./{}$-]+", word) else shlex.quote(word)


_HANDLERS: dict[str, Callable[[Asked, list[str]], Below | Said]] = {
    **dict.fromkeys((*_PROGRAMS, "script"), _script),
    **dict.fromkeys(("!", "sx", "system"), _system),
    **dict.fromkeys(MEASURING, _measuring),
    **dict.fromkeys(("file", "writefile"), _written),
    "capture": _capture,
    "time": _time,
    "timeit": _timeit,
}
