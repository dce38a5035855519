"""A notebook's file as something to execute: read, freed of what former runs left, and text again."""

import json
import warnings
from typing import Any

import nbformat
from nbformat.validator import normalize

from accelerate_nb.export.notebook import Notebook
from accelerate_nb.export.parameters import TAG

# The words of papermill, which other tools know too.
INJECTED = "injected-parameters"
_FORMAT = 4
_WITH_IDS = (4, 5)


def sheet(notebook: Notebook, parameters: str | None = None) -> tuple[Any, tuple[str, ...]]:
    """A notebook in today's format, without outputs, and what a person should know of its file."""
    # the source of `parameters` is in a cell after the one that sets them, in place of one from an earlier execution
    content, notes = _valid(notebook)
    for cell in content.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    content.metadata.pop("widgets", None)
    if parameters is not None:
        content.cells[:] = [cell for cell in content.cells if INJECTED not in _tags(cell)]
        behind = next(at for at, cell in enumerate(content.cells) if TAG in _tags(cell))
        cell = nbformat.v4.new_code_cell(parameters, metadata={"tags": [INJECTED]})
        if (content.nbformat, content.nbformat_minor) < _WITH_IDS:
            cell.pop("id", None)
        content.cells.insert(behind + 1, cell)
    return content, notes


def text_of(content: Any) -> str:
    """The text of a notebook's file."""
    written: str = nbformat.writes(content, version=nbformat.NO_CONVERT)
    return written if written.endswith("\n") else written + "\n"


def _valid(notebook: Notebook) -> tuple[Any, tuple[str, ...]]:
    """The file in today's format, repaired or rebuilt from its cells where it is not a valid notebook."""
    raw = json.loads(notebook.path.read_bytes().decode("utf-8-sig"))
    # outputs of former runs often make a file invalid
    for holder in (raw, *(sheet for sheet in raw.get("worksheets") or () if isinstance(sheet, dict))):
        for cell in holder.get("cells") or ():
            if isinstance(cell, dict) and cell.get("cell_type") == "code":
                cell["outputs"] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is repaired here, and reported
        try:
            content = nbformat.convert(nbformat.reader.reads(json.dumps(raw)), _FORMAT)
            changes, content = normalize(content, strip_invalid_metadata=True)
            nbformat.validate(content)
        except (nbformat.ValidationError, AttributeError, KeyError, TypeError, ValueError) as error:
            why = str(error).strip().partition("\n")[0]
            return _anew(notebook, raw), (f"its file is no valid notebook ({why}); it is rebuilt from its cells.",)
    if raw["nbformat"] != _FORMAT:
        return content, (f"its file has format {raw['nbformat']}; it is written in format {_FORMAT}.",)
    lacked = "its file lacked what a notebook has, such as ids of cells; it is written with it."
    return content, (lacked,) if changes else ()


def _anew(notebook: Notebook, raw: dict[str, Any]) -> Any:
    makers: dict[str, Any] = {
        "code": nbformat.v4.new_code_cell,
        "markdown": nbformat.v4.new_markdown_cell,
        "raw": nbformat.v4.new_raw_cell,
    }
    cells = []
    for cell in notebook.cells:
        metadata = {"tags": sorted(cell.tags)} if cell.tags else {}
        cells.append(makers[cell.kind](cell.source, metadata=metadata))
    content = nbformat.v4.new_notebook(cells=cells)
    raw_metadata: Any = raw.get("metadata")
    spec = raw_metadata.get("kernelspec") if isinstance(raw_metadata, dict) else None
    if isinstance(spec, dict) and isinstance(spec.get("name"), str):
        known = {key: value for key, value in spec.items() if isinstance(value, str)}
        content.metadata["kernelspec"] = nbformat.from_dict({"display_name": spec["name"], **known})
    return content


def _tags(cell: Any) -> tuple[str, ...]:
    tags: Any = cell.metadata.get("tags")
    return tuple(tags) if isinstance(tags, list) else ()
