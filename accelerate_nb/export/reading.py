"""A notebook's cells, read from its file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from accelerate_nb.errors import ExportError

Kind = Literal["code", "markdown", "raw"]

# The format that every frontend writes since 2015.
_CURRENT = 4
_PYTHON = ("", "python", "ipython", "python3")
# Kernels that Colab names without saying their language.
_OTHER_KERNELS = ("ir", "julia")


@dataclass(frozen=True, slots=True)
class Cell:
    r"""
    One cell; `number` is what `In [n]` says after Run All: code cells that hold something are counted from 1.

    Lines of `source` end in `\\n`, whatever the file's own line ends are.
    """

    kind: Kind
    source: str
    number: int | None = None
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Notebook:
    """The cells of a notebook, in their order."""

    path: Path
    cells: tuple[Cell, ...]


def read(path: str | Path) -> Notebook:
    """
    The notebook in a file, in any version of Jupyter's format, whatever else is wrong with its metadata.

    Raises `ExportError` for what is no notebook, and for a notebook in another language than Python.

    >>> [cell.number for cell in read("train.ipynb").cells if cell.kind == "code"]
    [1, 2, 3]
    """
    path = Path(path)
    content = _current(_content(path), path)
    if (language := _language(content.get("metadata"))) not in _PYTHON:
        raise ExportError(f"{path} is a notebook in {language}. Only notebooks in Python can be scripts of Python.")
    return Notebook(path, tuple(_cells(content["cells"])))


def _content(path: Path) -> Any:
    try:
        # a mark at the beginning of the file is none of its text
        return json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise ExportError(f"{path} was to be read as a notebook, but there is no such file.{_nearby(path)}") from None
    except IsADirectoryError:
        raise ExportError(f"{path} was to be read as a notebook, but it is a folder. Name a file in it.") from None
    except OSError as error:
        raise ExportError(f"{path} was to be read as a notebook, but it can't be: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ExportError(f"{path} is no notebook: it holds no JSON. Name a file that Jupyter has saved.") from None


def _nearby(path: Path) -> str:
    notebook = path.with_name(path.name + ".ipynb")
    return f" Did you mean {notebook}?" if notebook.exists() else ""


def _current(content: Any, path: Path) -> Mapping[str, Any]:
    """The content as version 4 has it."""
    version = content.get("nbformat") if isinstance(content, dict) else None
    if not isinstance(version, int) or not any(isinstance(content.get(key), list) for key in ("cells", "worksheets")):
        raise ExportError(f"{path} is no notebook: it lacks a notebook's cells. Name a file that Jupyter has saved.")
    if version > _CURRENT:
        raise ExportError(f"{path} is a notebook of format {version}; formats up to {_CURRENT} are known here.")
    if "cells" in content and version == _CURRENT:
        return _mapping(content)
    return _upgraded(content, path)


def _upgraded(content: dict[str, Any], path: Path) -> Mapping[str, Any]:
    # Only old notebooks need nbformat: its validator imports jsonschema, which builds a grammar of RFC 3987 with lark, and
    # that takes more than a second. What is read of version 4 (cells, their sources, their tags) is plain JSON.
    from nbformat import convert, from_dict

    try:
        return dict(convert(from_dict(content), _CURRENT))  # type: ignore[no-untyped-call]  # nbformat says few types
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise ExportError(
            f"{path} is a notebook of format {content['nbformat']} that can't be read: {type(error).__name__}: {error}. "
            f"Open it in Jupyter and save it."
        ) from None


def _language(metadata: Any) -> str:
    said = _mapping(metadata)
    kernel = _mapping(said.get("kernelspec"))
    language = _mapping(said.get("language_info")).get("name") or kernel.get("language")
    if not language and str(kernel.get("name", "")).startswith(_OTHER_KERNELS):
        language = kernel.get("display_name") or kernel["name"]
    name = str(language or "")
    return name.lower() if name.lower() in _PYTHON else name


def _cells(cells: Sequence[Any]) -> Iterator[Cell]:
    numbers = count(1)
    for cell in map(_mapping, cells):
        kind: Kind = known if (known := cell.get("cell_type")) in ("code", "markdown") else "raw"
        source = _text(cell.get("source"))
        number = next(numbers) if kind == "code" and source.strip() else None
        yield Cell(kind, source, number, frozenset(_tags(cell)))


def _text(source: Any) -> str:
    lines = source if isinstance(source, list) else [source]
    text = "".join(line for line in lines if isinstance(line, str))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _tags(cell: Mapping[str, Any]) -> Iterable[str]:
    tags = _mapping(cell.get("metadata")).get("tags")
    return (tag for tag in tags if isinstance(tag, str)) if isinstance(tags, list) else ()


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
