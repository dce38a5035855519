"""A notebook as the text of a script."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate_nb.export.parameters import Parameter
from accelerate_nb.export.plain import Wishes as Wishes
from accelerate_nb.export.reading import Notebook


@dataclass(frozen=True, slots=True)
class Script:
    """The text, what a person should know of it, and the options that it takes."""

    text: str
    notes: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()


def as_script(notebook: Notebook, wishes: Wishes = Wishes()) -> Script:  # noqa: B008 - frozen
    """
    The notebook as a script; `ExportError` names every cell and line that can't be in one.

    >>> as_script(read("train.ipynb")).text
    """
    lines = [f"# Exported from {notebook.path.name} by accelerate-nb.", f"# {wishes.keep_installs}"]
    for cell in notebook.cells:
        if cell.number is not None:
            lines += [f"# %% [{cell.number}] {notebook.path.name}", *cell.source.rstrip("\n").split("\n")]
    return Script("\n".join(lines) + "\n")
