"""The button that puts the form's choice as a cell into the notebook, below the form's own."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import anywidget
import traitlets


class InsertCellButton(anywidget.AnyWidget):
    """
    The button; `code` is the cell's text, and with none it is disabled.

    JupyterLab and Notebook alone let a page change the notebook: elsewhere nothing is shown, and the text above it is there to copy.
    """

    _esm = files(__package__).joinpath("insert_cell.js").read_text(encoding="utf-8")
    code: Any = traitlets.Unicode("").tag(sync=True)
