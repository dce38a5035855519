"""Notebooks that tests write: plain JSON, as Jupyter saves it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate_nb.export.notebook import read
from accelerate_nb.export.script import ExportedScript, as_script


def code(source: str, *tags: str) -> dict[str, Any]:
    cell = {"cell_type": "code", "metadata": {"tags": list(tags)} if tags else {}}
    return {**cell, "source": source.splitlines(keepends=True), "outputs": [], "execution_count": None}


def markdown(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "source": source, "metadata": {}}


def notebook(path: Path, *cells: str | Mapping[str, Any], **metadata: Any) -> Path:
    """A notebook in a file; text is a code cell."""
    content = {
        "nbformat": 4,
        "nbformat_minor": 4,
        "metadata": {"language_info": {"name": "python"}, **metadata},
        "cells": [code(cell) if isinstance(cell, str) else cell for cell in cells],
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def script(folder: Path, *cells: str | Mapping[str, Any], name: str = "train.ipynb") -> ExportedScript:
    """These cells as a script."""
    return as_script(read(notebook(folder / name, *cells)))


def exported(folder: Path, *cells: str | Mapping[str, Any], name: str = "train.ipynb") -> Path:
    """These cells as a script in a file beside the notebook."""
    path = (folder / name).with_suffix(".py")
    path.write_text(script(folder, *cells, name=name).text, encoding="utf-8")
    return path


def cell_lines(text: str) -> list[str]:
    """A script's lines without its header and without what was added."""
    begin = text.index("\n# %% ")
    return [line for line in text[begin:].split("\n") if line and not line.endswith("  # +")]
