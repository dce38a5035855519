"""A code cell as plain Python: IPython's own syntax is translated, left out or refused, line by line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import partial

from accelerate_nb.export import cell_magics, commands, line_magics
from accelerate_nb.export.calls import Call, CellMagic, found, is_python, is_too_deep, own_calls, parsed
from accelerate_nb.export.plain import Plain, Remark, Wishes
from accelerate_nb.export.saying import Asked, Said, left_out

# Gives None where there is no notebook, as the notebook's own does not.
_GET_IPYTHON = "from IPython import get_ipython"
_TOO_DEEP = Remark(
    1, "the cell is nested too deeply for Python to read it. Make several statements of its longest one."
)
# How much of a line is told in a problem.
_WIDEST = 100


def plain(source: str, wishes: Wishes = Wishes(), *, on_ranks: bool = False) -> Plain:  # noqa: B008 - frozen
    """
    A cell as Python with exactly as many lines, and what a person should know of it.

    With `on_ranks` every process of a launch runs the cell's commands, as in a cell of %%accelerate; otherwise one process
    of each machine does.

    >>> plain("files = !ls data").source
    'files = nb_shell.capture("ls data")'
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    # before IPython looks at it: on some Pythons each of its tokens holds a copy of the whole line
    if is_too_deep(source):
        return Plain(source, problems=(_TOO_DEEP,))
    if is_python(source):
        return _with_own_calls(source, wishes, on_ranks=on_ranks)
    read = found(source)
    if read.magic is not None:
        return _cell(read.magic, list(read.lines), wishes, on_ranks=on_ranks)
    if not read.calls and (line := _automagic(read.lines)) is not None:
        return plain(line, wishes, on_ranks=on_ranks)
    result = _lines(read.lines, read.calls, source.split("\n"), wishes, on_ranks=on_ranks)
    if result.problems:
        return result
    problems = tuple(_wrong_python(result.source))
    return Plain(result.source, result.imports, result.notes, problems)


def _with_own_calls(source: str, wishes: Wishes, *, on_ranks: bool) -> Plain:
    if "get_ipython" not in source:
        return Plain(source)
    tree = parsed(source)
    assert tree is not None
    calls = tuple(own_calls(tree, source))
    lines = source.split("\n")
    result = _lines(lines, calls, lines, wishes, on_ranks=on_ranks)
    left = parsed(result.source)
    reads = left and any(isinstance(node, ast.Name) and node.id == "get_ipython" for node in ast.walk(left))
    imports = (*result.imports, _GET_IPYTHON) if reads else result.imports
    return Plain(result.source, imports, result.notes, result.problems)


def _asked(name: str, text: str, wishes: Wishes, *, on_ranks: bool, call: Call | None = None) -> Asked:
    inner = partial(plain, wishes=wishes, on_ranks=on_ranks)
    assigned, inside = (call.is_assigned, call.is_inside) if call else (False, False)
    return Asked(name, text, wishes, inner, assigned, inside, on_ranks)


def _lines(
    lines: Sequence[str], calls: Sequence[Call], originals: Sequence[str], wishes: Wishes, *, on_ranks: bool
) -> Plain:
    """Calls of IPython are replaced in the lines in which they stand."""
    written = list(lines)
    imports: list[str] = []
    notes: list[Remark] = []
    problems: list[Remark] = []
    for call in calls:
        said = _said(call, _asked(call.name, call.text, wishes, on_ranks=on_ranks, call=call))
        imports += said.imports
        if said.note:
            notes.append(Remark(call.first, said.note))
        if said.problem:
            problems.append(Remark(call.first, said.problem))
        written[call.first - 1 : call.last] = _placed(call, said, originals[call.first - 1 : call.last])
    return Plain("\n".join(written), tuple(dict.fromkeys(imports)), tuple(notes), tuple(problems))


def _said(call: Call, asked: Asked) -> Said:
    if call.kind == "line":
        return line_magics.line(asked)
    if call.kind == "system":
        return commands.run(asked)
    if call.kind == "getoutput":
        return commands.captured(asked)
    return left_out("?", "it only shows something to whoever sits at a notebook.")


def _placed(call: Call, said: Said, originals: Sequence[str]) -> list[str]:
    """As many lines as the call had; what is left out stays as a comment."""
    indent = call.before[: len(call.before) - len(call.before.lstrip())]
    more = len(originals) - 1
    if said.text is not None:
        target = f"{said.target} = " if said.target else ""
        return [f"{call.before}{target}{said.text}{call.after}", *["#"] * more]
    comments = [f"# {line.strip()}" for line in originals]
    if call.is_assigned:
        return [f"{call.before}None  {comments[0]}", *comments[1:]]
    if call.after.strip().startswith(";"):
        return [f"{indent}pass{call.after}", *["#"] * more]
    return [f"{indent}pass  {comments[0]}" if indent else comments[0], *comments[1:]]


def _cell(magic: CellMagic, lines: list[str], wishes: Wishes, *, on_ranks: bool) -> Plain:
    asked = _asked(magic.name, magic.rest, wishes, on_ranks=on_ranks)
    above, body = lines[: magic.line - 1], lines[magic.line :]
    try:
        below = cell_magics.cell(asked, body)
    except cell_magics.Unsayable as inner:
        moved = (Remark(one.line + magic.line, one.text) for one in inner.problems)
        return Plain("\n".join(lines), problems=tuple(moved))
    if isinstance(below, Said):
        commented = [*above, cell_magics.was(asked), *(f"# {line}".rstrip() for line in body)]
        notes = tuple(Remark(magic.line, text) for text in (below.note,) if text)
        problems = tuple(Remark(magic.line, text) for text in (below.problem,) if text)
        return Plain("\n".join(commented), notes=notes, problems=problems, left_out=True)
    notes = tuple(Remark(one.line + magic.line, one.text) for one in below.notes)
    source = "\n".join([*above, below.opening, *below.lines])
    problems = tuple(_wrong_python(source))
    return Plain(source, tuple(dict.fromkeys(below.imports)), notes, problems)


def _automagic(lines: Sequence[str]) -> str | None:
    """A cell of one line that IPython takes for a magic without its `%`."""
    said = [line for line in lines if line.strip()]
    word = re.match(r"\s*(\w+)(?=\s|$)(?!\s*=)", said[0]) if len(said) == 1 else None
    if word is None or word[1] not in line_magics.known():
        return None
    return "\n".join(f"%{line.lstrip()}" if line.strip() else line for line in lines)


def _wrong_python(source: str) -> Iterator[Remark]:
    """What Python can't read, with a guess at what was meant."""
    if is_too_deep(source):
        yield _TOO_DEEP
        return
    try:
        ast.parse(source)
    except SyntaxError as error:
        line = (error.text or "").strip()
        word = re.match(r"\w+", line)
        hint = f" `{word[0]}` is a magic: write `%{line}`." if word and word[0] in line_magics.known() else ""
        yield Remark(error.lineno or 1, f"`{_short(line)}` is no Python: {error.msg.rstrip('.?')}.{hint}")
    except ValueError as error:
        yield Remark(1, f"the cell is no Python: {error}.")


def _short(line: str) -> str:
    return line if len(line) <= _WIDEST else f"{line[: _WIDEST - 3]}..."
