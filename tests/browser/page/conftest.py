"""A real Chromium with the panel in a page of its own: no notebook, no kernel, nothing but messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
NOTEBOOK = HERE.parents[2] / "accelerate_nb" / "notebook"
FILES = {"/": HERE / "page.html", "/panel.js": NOTEBOOK / "panel.js", "/panel.css": NOTEBOOK / "panel.css"}
KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css"}
ADDRESS = "http://127.0.0.1:1/"  # nothing listens there: every file is given by `serve`


def serve(route: Any) -> None:
    path = "/" + route.request.url.removeprefix(ADDRESS)
    file = FILES.get(path)
    if file is None:
        route.fulfill(status=404, body="")
    else:
        route.fulfill(body=file.read_bytes(), content_type=KINDS[file.suffix])


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """An empty page with the module loaded as `panel`; errors of its scripts fail the test."""
    context = chromium.new_context(viewport={"width": 1280, "height": 1400}, accept_downloads=True)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.route("**/*", serve)
    page.goto(ADDRESS)
    page.wait_for_function("window.ready === true")
    yield page
    context.close()
    assert errors == []


@pytest.fixture
def show(page: Any) -> Any:
    """Draws the panel and gives it messages."""

    def _show(messages: list[dict[str, Any]]) -> Any:
        page.evaluate("() => { window.start(); }")
        page.evaluate("(messages) => window.give(...messages)", messages)
        page.wait_for_function("document.querySelector('.anb-name').textContent !== 'run'")
        return page

    return _show
