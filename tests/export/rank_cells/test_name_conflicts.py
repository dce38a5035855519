"""A notebook with two namespaces becomes a script with one: with the same values, or not at all."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from accelerate_nb.export.notebook import NotebookCell
from accelerate_nb.export.rank_cells.translate import ranked
from accelerate_nb.export.translated_cell import RankCells

SESSION = {"rank": 0, "world_size": 1, "device": "cpu", "accelerator": "an accelerator"}
NAMES = "abcf"


def cells_of(*sources: str) -> list[NotebookCell]:
    """Code cells, numbered from 1."""
    return [NotebookCell("code", source, number) for number, source in enumerate(sources, start=1)]


def problems_of(found: RankCells) -> list[str]:
    """What keeps a notebook from being exported."""
    inside = [
        f"{number}:{problem.line} {problem.text}" for number, cell in found.cells.items() for problem in cell.problems
    ]
    return inside + [f"{number}:{problem.line} {problem.text}" for number, problem in found.problems]


def notes_of(found: RankCells) -> list[str]:
    """What is to be told of it."""
    inside = [f"{number}:{note.line} {note.text}" for number, cell in found.cells.items() for note in cell.notes]
    return inside + [f"{number}:{note.line} {note.text}" for number, note in found.notes]


# ------------------------------------------------------------------------------------------------ two namespaces as one


def in_the_notebook(sources: list[str]) -> list[Any]:
    """What cells tell where the notebook and one rank have their own names, and copies go between them."""
    outputs: list[Any] = []
    notebook_names: dict[str, Any] = {"tell": lambda value: outputs.append(shown(value))}
    rank_names: dict[str, Any] = {**notebook_names, **SESSION}
    for source in sources:
        if source.startswith("%%accelerate"):
            first, _, body = source.partition("\n")
            for names in [notebook_names, rank_names] if "--local" in first else [rank_names]:
                before = len(outputs)
                exec(body, names)
                # the script tells it once
                outputs[before:] = outputs[before:] if names is rank_names else []
            continue
        for line in blocks(source):
            words = line.split()
            if words[:2] == ["%accelerate", "push"]:
                rank_names[words[2]] = sent(notebook_names[words[2]])
            elif words[:2] == ["%accelerate", "pull"]:
                notebook_names[words[2]] = sent(rank_names[words[2]])
            else:
                exec(line, notebook_names)
    return outputs


def shown(value: Any) -> str:
    """A value as it is now."""
    return f"a function of {value.__code__.co_names}" if callable(value) else repr(value)


def sent(value: Any) -> Any:
    """A copy, as pickling makes one: a function's names go along."""
    if not callable(value):
        return copy.deepcopy(value)
    names = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
    apart = {name: sent(item) if item is not value else item for name, item in names.items()}
    return type(value)(value.__code__, {"__builtins__": __builtins__, **apart})


def blocks(source: str) -> Iterator[str]:
    """The statements of a cell, each with what is indented below it."""
    lines: list[str] = []
    for line in source.split("\n"):
        if lines and not line.startswith(" "):
            yield "\n".join(lines)
            lines = []
        lines.append(line)
    yield "\n".join(lines)


def in_the_script(sources: list[str], found: RankCells) -> list[Any]:
    """What the same cells tell as the code of a script, in one process."""
    outputs: list[Any] = []
    names: dict[str, Any] = {"tell": lambda value: outputs.append(shown(value))}
    names |= {"push": lambda value: value, "pull": sent}
    for number, source in enumerate(sources, start=1):
        if number == found.first:
            names |= SESSION
        exec(found.cells[number].source if number in found.cells else source, names)
    return outputs


def any_statement(draw: random.Random) -> str:
    """A line, or a block, over a few names."""
    name, other = draw.choice(NAMES), draw.choice(NAMES)
    number = draw.randrange(100)
    return draw.choice(
        [
            f"{name} = [{number}]",
            f"{name} = {other}",
            f"{name} = list({other}) + [{number}]",
            f"{name}.append({number})",
            f"{name} += [{number}]",
            f"{name}[0] = {number}",
            f"tell({name})",
            f"tell({name})",
            f"if {number} % 2:\n    {name} = [{number}]",
            f"for {name} in [[{number}]]:\n    tell({name})",
            f"for _ in range({number} % 3):\n    tell({other})\n    {name} = [{number}]",
            f"def f():\n    return {other}",
            f"def f():\n    {other}.append({number})",
            f"def f():\n    global {name}\n    {name} = [{number}]",
            "tell(f())",
            f"f = lambda: {other}",
            f"del {name}",
            f"try:\n    {name} = {other} + [{number}]\nexcept TypeError:\n    {name} = [{number}]",
        ]
    )


def any_cell(draw: random.Random) -> str:
    """A cell of the notebook, of the ranks or of both, or a command."""
    cell_type = draw.choice(["notebook", "notebook", "ranks", "ranks", "push", "pull", "both"])
    if cell_type in {"push", "pull"}:
        return f"%accelerate {cell_type} {draw.choice(NAMES)}"
    body = "\n".join(any_statement(draw) for _ in range(draw.randrange(1, 4)))
    return body if cell_type == "notebook" else f"%%accelerate{' --local' * (cell_type == 'both')}\n{body}"


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 4))])
def test_what_is_exported_prints_the_same_as_the_notebook(part: int) -> None:
    compared = 0
    for seed in range(part * 400, (part + 1) * 400):
        draw = random.Random(seed)
        begin = "\n".join(f"{name} = [{number}]" for number, name in enumerate(NAMES[:-1])) + "\ndef f():\n    return a"
        flags = draw.choice(["", " --local"])
        sources = [
            f"%%accelerate{flags}\n{begin}",
            *([begin] if not flags else []),
            *(any_cell(draw) for _ in range(draw.randrange(2, 8))),
        ]
        found = ranked(cells_of(*sources))
        if problems_of(found):
            continue
        try:
            expected = in_the_notebook(sources)
        except Exception:
            continue  # a notebook that fails is none to compare with
        if not expected:
            continue
        compared += 1
        text = "\n\n".join(sources)
        assert in_the_script(sources, found) == expected, f"seed {seed}:\n{text}"
    assert compared > 20
