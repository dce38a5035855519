"""A code cell as plain Python: IPython's own syntax is translated, given to IPython, left out or refused, line by line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import partial

from accelerate_nb.export.ipython import cell_magics, line_magics, shell_commands
from accelerate_nb.export.ipython.find import (
    FoundCellMagic,
    SyntaxPiece,
    found,
    ipython_calls,
    is_python,
    is_too_deep,
    parsed,
)
from accelerate_nb.export.ipython.replacements import MagicCall, Replacement, left_out
from accelerate_nb.export.translated_cell import ExportOptions, PlainCell, Remark

# Gives None where there is no notebook, as the notebook's own does not.
_GET_IPYTHON = "from IPython import get_ipython"
_TOO_DEEP = Remark(
    1, "the cell is nested too deeply for Python to read it. Make several statements of its longest one."
)
# The length of a line in a problem.
_WIDEST = 100


def plain(source: str, export_options: ExportOptions = ExportOptions(), *, on_ranks: bool = False) -> PlainCell:  # noqa: B008 - frozen
    """
    A cell as Python with exactly as many lines, with notes for the user.

    With `on_ranks` every process of a launch runs the cell's commands, as in a cell of %%accelerate; otherwise one process
    of each machine does.

    >>> plain("files = !ls data").source
    'files = nb_shell.capture("ls data")'
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    # before IPython parses it: on some Pythons each of its tokens holds a copy of the whole line
    if is_too_deep(source):
        return PlainCell(source, problems=(_TOO_DEEP,))
    if is_python(source):
        return _with_ipython_calls(source, export_options, on_ranks=on_ranks)
    read = found(source)
    if read.magic is not None:
        return _cell(read.magic, list(read.lines), export_options, on_ranks=on_ranks)
    if not read.calls and (line := _automagic(read.lines)) is not None:
        return plain(line, export_options, on_ranks=on_ranks)
    result = _lines(read.lines, read.calls, source.split("\n"), export_options, on_ranks=on_ranks)
    if result.problems:
        return result
    problems = tuple(_wrong_python(result.source))
    return PlainCell(result.source, result.imports, result.notes, problems)


def _with_ipython_calls(source: str, export_options: ExportOptions, *, on_ranks: bool) -> PlainCell:
    if "get_ipython" not in source:
        return PlainCell(source)
    tree = parsed(source)
    assert tree is not None
    calls = tuple(ipython_calls(tree, source))
    lines = source.split("\n")
    result = _lines(lines, calls, lines, export_options, on_ranks=on_ranks)
    left = parsed(result.source)
    reads = left and any(isinstance(node, ast.Name) and node.id == "get_ipython" for node in ast.walk(left))
    imports = (*result.imports, _GET_IPYTHON) if reads else result.imports
    return PlainCell(result.source, imports, result.notes, result.problems)


def _magic_call(
    name: str, text: str, export_options: ExportOptions, *, on_ranks: bool, call: SyntaxPiece | None = None
) -> MagicCall:
    inner = partial(plain, export_options=export_options, on_ranks=on_ranks)
    assigned, inside = (call.is_assigned, call.is_inside) if call else (False, False)
    return MagicCall(name, text, export_options, inner, assigned, inside, on_ranks)


def _lines(
    lines: Sequence[str],
    calls: Sequence[SyntaxPiece],
    originals: Sequence[str],
    export_options: ExportOptions,
    *,
    on_ranks: bool,
) -> PlainCell:
    """Calls of IPython are replaced in the lines in which they stand."""
    written = list(lines)
    imports: list[str] = []
    notes: list[Remark] = []
    problems: list[Remark] = []
    for call in calls:
        magic_call = _magic_call(call.name, call.text, export_options, on_ranks=on_ranks, call=call)
        replacement = _replacement(call, magic_call)
        imports += replacement.imports
        if replacement.note:
            notes.append(Remark(call.first, replacement.note))
        if replacement.problem:
            problems.append(Remark(call.first, replacement.problem))
        written[call.first - 1 : call.last] = _placed(call, replacement, originals[call.first - 1 : call.last])
    return PlainCell("\n".join(written), tuple(dict.fromkeys(imports)), tuple(notes), tuple(problems))


def _replacement(call: SyntaxPiece, magic_call: MagicCall) -> Replacement:
    if call.kind == "line":
        return line_magics.line(magic_call)
    if call.kind == "system":
        return shell_commands.run(magic_call)
    if call.kind == "getoutput":
        return shell_commands.captured(magic_call)
    return left_out("?", "it only shows something in a notebook.")


def _placed(call: SyntaxPiece, replacement: Replacement, originals: Sequence[str]) -> list[str]:
    """As many lines as the call had; what is left out stays as a comment."""
    indent = call.before[: len(call.before) - len(call.before.lstrip())]
    more = len(originals) - 1
    if replacement.text is not None:
        return [f"{call.before}{replacement.text}{call.after}", *["#"] * more]
    comments = [f"# {line.strip()}" for line in originals]
    if call.is_assigned:
        return [f"{call.before}None  {comments[0]}", *comments[1:]]
    if call.after.strip().startswith(";"):
        return [f"{indent}pass{call.after}", *["#"] * more]
    return [f"{indent}pass  {comments[0]}" if indent else comments[0], *comments[1:]]


def _cell(magic: FoundCellMagic, lines: list[str], export_options: ExportOptions, *, on_ranks: bool) -> PlainCell:
    magic_call = _magic_call(magic.name, magic.rest, export_options, on_ranks=on_ranks)
    above, body = lines[: magic.line - 1], lines[magic.line :]
    try:
        below = cell_magics.cell(magic_call, body)
    except cell_magics.UntranslatableCode as inner:
        moved = (Remark(problem.line + magic.line, problem.text) for problem in inner.problems)
        return PlainCell("\n".join(lines), problems=tuple(moved))
    if isinstance(below, Replacement):
        commented = [*above, cell_magics.was(magic_call), *(f"# {line}".rstrip() for line in body)]
        notes = tuple(Remark(magic.line, text) for text in (below.note,) if text)
        problems = tuple(Remark(magic.line, text) for text in (below.problem,) if text)
        return PlainCell("\n".join(commented), notes=notes, problems=problems, left_out=True)
    notes = tuple(Remark(note.line + magic.line, note.text) for note in below.notes)
    source = "\n".join([*above, below.opening, *below.lines])
    problems = tuple(_wrong_python(source))
    return PlainCell(source, tuple(dict.fromkeys(below.imports)), notes, problems)


def _automagic(lines: Sequence[str]) -> str | None:
    """A cell of one line that IPython takes for a magic without its `%`."""
    filled = [line for line in lines if line.strip()]
    word = re.match(r"\s*(\w+)(?=\s|$)(?!\s*=)", filled[0]) if len(filled) == 1 else None
    if word is None or word[1] not in line_magics.known():
        return None
    return "\n".join(f"%{line.lstrip()}" if line.strip() else line for line in lines)


def _wrong_python(source: str) -> Iterator[Remark]:
    """The syntax error of a cell, with a suggestion."""
    if is_too_deep(source):
        yield _TOO_DEEP
        return
    try:
        ast.parse(source)
    except SyntaxError as error:
        line = (error.text or "").strip()
        word = re.match(r"\w+", line)
        suggestion = f" `{word[0]}` is a magic: write `%{line}`." if word and word[0] in line_magics.known() else ""
        short = line if len(line) <= _WIDEST else f"{line[: _WIDEST - 3]}..."
        yield Remark(error.lineno or 1, f"`{short}` is no Python: {error.msg.rstrip('.?')}.{suggestion}")
    except ValueError as error:
        yield Remark(1, f"the cell is no Python: {error}.")
