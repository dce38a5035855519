"""Facts as Markdown, which issues are written in: headings, names and values."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any


def lines_of(facts: Mapping[str, Any]) -> Iterator[str]:
    """The facts as Markdown, which issues are written in."""
    for heading, inner in facts.items():
        yield f"### {heading.replace('_', ' ') if heading != 'accelerate_nb' else heading}"
        yield from list(_items(inner)) or ["- nothing that differs from the defaults"]
        yield ""


def _items(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in facts.items():
        if value is None or value in ({}, []):
            continue
        if isinstance(value, Mapping):
            yield f"{indent}- {name}:"
            yield from _items(value, indent + "  ")
        elif isinstance(value, list):
            yield f"{indent}- {name}: {', '.join(map(_item, value))}"
        elif isinstance(value, str) and "\n" in value:
            yield f"{indent}- {name}:"
            yield from (f"{indent}      {line}".rstrip() for line in value.splitlines())
        else:
            yield f"{indent}- {name}: {_word(value)}"


def _item(value: Any) -> str:
    return ", ".join(_word(item) for item in value.values()) if isinstance(value, Mapping) else _word(value)


def _word(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def write(line: str) -> None:
    """Print a line; in a terminal its heading or name stands out."""
    if not sys.stdout.isatty():
        print(line)
        return
    from rich.console import Console
    from rich.text import Text

    style = "bold" if line.startswith("###") else ""
    Console(soft_wrap=True, highlight=False).print(Text(line, style=style))
