"""A page of HTML that holds a report, as a file."""

from __future__ import annotations

from pathlib import Path

from accelerate_nb.errors import ConfigurationError

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>:root {{ color-scheme: light dark; }} body {{ background: Canvas; color: CanvasText; }} h1 {{ font-size: 1.3em; }} body {{ font: 14px system-ui, sans-serif; margin: 1.5em; }} td, th {{ padding: 1px 10px 1px 0; vertical-align: top; }}</style>
</head><body><main>
<h1>{title}</h1>
{body}
</main></body></html>
"""


def write_page(path: Path, title: str, body: str) -> None:
    """Write a page; raises `ConfigurationError` where the file can't be written."""
    from html import escape

    try:
        path.write_text(_PAGE.format(title=escape(title), body=body), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"The report was to be written into {path}, which can't be done: {error.strerror}. Name another file."
        ) from None
