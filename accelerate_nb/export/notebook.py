"""A notebook's cells, read from its file."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from accelerate_nb.errors import ConfigurationError, ExportError

CellKind = Literal["code", "markdown", "raw"]

# The format that every frontend writes since 2015.
_CURRENT = 4
_CELL_KINDS: Mapping[str, CellKind] = {"code": "code", "markdown": "markdown", "heading": "markdown"}
# Formats 2 and 3 keep a code cell's text under another name.
_SOURCES = ("source", "input")
_PYTHON = ("", "python", "ipython", "python3")
# Kernels that Colab names without their language.
_OTHER_KERNELS = ("ir", "julia")


@dataclass(frozen=True, slots=True)
class NotebookCell:
    """One cell; `number` is that of `In [n]` after Run All: code cells that are not empty are counted from 1."""

    # lines of `source` end in a line feed, whatever the file's own line ends are

    kind: CellKind
    source: str
    number: int | None = None
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Notebook:
    """The cells of a notebook, in their order."""

    path: Path
    cells: tuple[NotebookCell, ...]


def read(path: str | Path) -> Notebook:
    """The notebook in a file, in any version of Jupyter's format, whatever else is wrong with its metadata."""
    path = Path(path)
    content = _content(path)
    # Without nbformat, for two reasons: importing it takes more than a second (its validator imports jsonschema, which has
    # lark build a grammar of RFC 3987), and it refuses old notebooks that lack an unneeded key.
    version = content.get("nbformat") if isinstance(content, dict) else None
    if not isinstance(version, int) or not any(isinstance(content.get(key), list) for key in ("cells", "worksheets")):
        raise ExportError(f"{path} is no notebook: it lacks a notebook's cells. Name a file that Jupyter has saved.")
    if version > _CURRENT:
        raise ExportError(
            f"{path} is a notebook of format {version}, and formats up to {_CURRENT} are known here. Save it in one of these."
        )
    if (language := _language(content.get("metadata"))) not in _PYTHON:
        raise ExportError(f"{path} is a notebook in {language}. Only notebooks in Python can be scripts of Python.")
    return Notebook(path, tuple(_cells(content)))


def _content(path: Path) -> Any:
    try:
        # a mark at the beginning of the file is none of its text
        return json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        other = path.with_name(path.name + ".ipynb")
        hint = f"Did you mean {other}?" if other.exists() else "Correct its path."
        raise ConfigurationError(f"{path} was to be read as a notebook, but there is no such file. {hint}") from None
    except IsADirectoryError:
        raise ConfigurationError(
            f"{path} was to be read as a notebook, but it is a folder. Name a file in it."
        ) from None
    except OSError as error:
        raise ExportError(
            f"{path} was to be read as a notebook, but it can't be: {error.strerror}. Give yourself the permission to read it."
        ) from None
    except (ValueError, RecursionError):
        raise ExportError(f"{path} is no notebook: it holds no JSON. Name a file that Jupyter has saved.") from None


def _language(metadata: Any) -> str:
    described = _mapping(metadata)
    kernel = _mapping(described.get("kernelspec"))
    language = _mapping(described.get("language_info")).get("name") or kernel.get("language")
    if not language and str(kernel.get("name", "")).startswith(_OTHER_KERNELS):
        language = kernel.get("display_name") or kernel["name"]
    name = str(language or "")
    return name.lower() if name.lower() in _PYTHON else name


def _cells(content: Mapping[str, Any]) -> Iterator[NotebookCell]:
    # formats 2 and 3 keep cells on sheets
    sheets = [content] if "cells" in content else content.get("worksheets") or ()
    numbers = count(1)
    for cell in (_mapping(cell) for sheet in sheets for cell in _list(_mapping(sheet).get("cells"))):
        kind = _CELL_KINDS.get(str(cell.get("cell_type")), "raw")
        source = _source(cell)
        number = next(numbers) if kind == "code" and source.strip() else None
        tags = (tag for tag in _list(_mapping(cell.get("metadata")).get("tags")) if isinstance(tag, str))
        yield NotebookCell(kind, source, number, frozenset(tags))


def _source(cell: Mapping[str, Any]) -> str:
    value = next((cell[key] for key in _SOURCES if key in cell), "")
    text = "".join(line for line in (_list(value) or [value]) if isinstance(line, str))
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return f"{'#' * int(cell['level'])} {text}" if isinstance(cell.get("level"), int) else text


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
