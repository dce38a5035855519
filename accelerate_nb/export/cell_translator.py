"""Each code cell as Python that could stand in a script, and what of it could not."""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from accelerate_nb.export.awaiting import without_annotations
from accelerate_nb.export.hearing import NAME, cell_magic
from accelerate_nb.export.hoisting import hoisted
from accelerate_nb.export.launches import kept_changes
from accelerate_nb.export.line_magics import known
from accelerate_nb.export.magics import plain
from accelerate_nb.export.names import bound, looked_up
from accelerate_nb.export.parameters import TAG, Parameter, parameters_of
from accelerate_nb.export.plain import Plain, Ranked, Remark, Wishes
from accelerate_nb.export.ranks import ranked
from accelerate_nb.export.reading import Cell

RAISES = "raises-exception"
# `_` is the last result, `_3` and `Out[3]` those of cell 3, `In` the texts of the cells.
_PAST_RESULT = re.compile(r"_{1,3}|_i{0,3}\d*|Out|In|_[oi]h")


@dataclass(frozen=True, slots=True)
class Translated:
    """A code cell in plain Python, with as many lines; a cell that is left out is text, and parses as nothing."""

    cell: Cell
    plain: Plain
    futures: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()

    @property
    def number(self) -> int:
        """The cell's number; cells without one are not translated."""
        assert self.cell.number is not None
        return self.cell.number

    @property
    def tree(self) -> ast.Module:
        """Its statements."""
        return ast.parse("" if self.plain.left_out else self.plain.source)


@dataclass(frozen=True, slots=True)
class Translation:
    """All code cells of a notebook, by number, and how its `%%accelerate` cells want to be run."""

    cells: dict[int, Translated]
    ranks: Ranked

    def notes(self) -> list[tuple[int, Remark]]:
        """What a person should know, with the numbers of the cells, in the order of the lines."""
        trees = ((number, one.tree) for number, one in self.cells.items())
        return sorted([*self._remarks(self.ranks.notes, "notes"), *kept_changes(trees)], key=_place)

    def problems(self) -> list[tuple[int, Remark]]:
        """What keeps the notebook from being a script, with the numbers of the cells, in the order of the lines."""
        return sorted(
            [
                *self._remarks(self.ranks.problems, "problems"),
                *self._second_parameters(),
                *self._past_results(),
                *self._magics_like_python(),
            ],
            key=_place,
        )

    def _remarks(self, of_ranks: Iterable[tuple[int, Remark]], kind: str) -> Iterator[tuple[int, Remark]]:
        yield from of_ranks
        for one in self.cells.values():
            yield from ((one.number, remark) for remark in getattr(one.plain, kind))

    def _second_parameters(self) -> Iterator[tuple[int, Remark]]:
        tagged = [number for number, one in self.cells.items() if TAG in one.cell.tags]
        for number in tagged[1:]:
            yield (
                number,
                Remark(1, f"cell {tagged[0]} is tagged `{TAG}` already; a script has its options from one cell."),
            )

    def _past_results(self) -> Iterator[tuple[int, Remark]]:
        sound = [one for one in self.cells.values() if not one.plain.problems]
        own = {name for one in sound for name in bound(one.tree.body)}
        for one in sound:
            for name, line in _past_results_of(one.tree.body).items():
                if name not in own:
                    what = f"`{name}` is what IPython keeps of other cells; give the value a name where it is computed"
                    yield one.number, Remark(line, f"{what}.")

    def _magics_like_python(self) -> Iterator[tuple[int, Remark]]:
        """A cell of `ls -la` is a difference to Python, and a magic to IPython while nothing is called `ls`."""
        sound = [one for one in self.cells.values() if not one.plain.problems]
        own = {name for one in sound for name in bound(one.tree.body)}
        for one in sound if "*" not in own else ():
            source = one.plain.source.strip()
            word = re.match(r"\w+", source)
            if word is None or "\n" in source or word[0] in own or hasattr(builtins, word[0]):
                continue
            if word[0] in known() and word[0] in looked_up(one.tree.body):
                line = one.plain.source[: one.plain.source.index(source)].count("\n") + 1
                yield one.number, Remark(line, f"nothing is called `{word[0]}`, so it is a magic: write `%{source}`.")


def _past_results_of(nodes: Iterable[ast.stmt]) -> dict[str, int]:
    """Names that IPython keeps results under, and the first lines that they stand on."""
    lines: dict[str, int] = {}
    for node in nodes:
        found = {name for name in looked_up([node]) if _PAST_RESULT.fullmatch(name)}
        for part in ast.walk(node) if found else ():
            if isinstance(part, ast.Name) and part.id in found:
                lines.setdefault(part.id, part.lineno)
    return lines


def translated(cells: Sequence[Cell], wishes: Wishes) -> Translation:
    """Translate the code cells among these; nothing is raised, problems are kept."""
    code = [cell for cell in cells if cell.number is not None]
    ranks = ranked([cell for cell in code if RAISES not in cell.tags])
    return Translation(
        {cell.number: _translated(cell, ranks, wishes) for cell in code if cell.number is not None}, ranks
    )


def _translated(cell: Cell, ranks: Ranked, wishes: Wishes) -> Translated:
    if RAISES in cell.tags:
        note = Remark(1, f"the cell was left out: it is tagged `{RAISES}`, and would end the script.")
        return Translated(cell, Plain(cell.source, notes=(note,), left_out=True))
    of_ranks = ranks.cells.get(cell.number or 0)
    found = plain(cell.source, wishes) if of_ranks is None else _joined(cell, of_ranks, wishes)
    if found.left_out or found.problems:
        return Translated(cell, found)
    try:
        return _checked(cell, found)
    except SyntaxError as error:
        line = error.lineno or 1
        text = found.source.split("\n")[line - 1].strip()
        problem = Remark(line, f"`{text}` is no Python: {error.msg}.")
        return Translated(cell, replace(found, problems=(problem,)))


def _joined(cell: Cell, first: Plain, wishes: Wishes) -> Plain:
    if first.left_out or first.problems:
        return first
    magic = cell_magic(cell.source)
    then = plain(first.source, wishes, on_ranks=magic is not None and magic.name == NAME)
    imports = tuple(dict.fromkeys((*first.imports, *then.imports)))
    return replace(then, imports=imports, notes=(*first.notes, *then.notes))


def _checked(cell: Cell, found: Plain) -> Translated:
    """The cell as the script has it; `SyntaxError` where Python could not run it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of the same things when the script runs
        with_future = hoisted(found.source)
        compile(with_future.source, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        source = without_annotations(with_future.source)
        options = parameters_of(source) if TAG in cell.tags else None
    if options is None:
        return Translated(cell, replace(found, source=source), with_future.names)
    problems = (*found.problems, *options.problems)
    return Translated(cell, replace(found, source=source, problems=problems), with_future.names, options.found)


def _place(remark: tuple[int, Remark]) -> tuple[int, int]:
    number, said = remark
    return number, said.line
