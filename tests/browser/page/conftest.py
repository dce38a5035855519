"""A real Chromium with the panel in a page of its own: no notebook, no kernel, nothing but messages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb.notebook.page.bundle import sources
from tests.browser.page.feeds import PAGE

FOLDER = Path(__file__).parent
FILES = {"/": FOLDER / "page.html"} | {
    f"/{file.name}": file for file in (*PAGE.iterdir(), *PAGE.glob("vendor/*")) if file.suffix in {".js", ".css"}
}
KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css"}
ROOM = {"width": 1280, "height": 1400}
ADDRESS = "http://127.0.0.1:1/"  # nothing listens there: every file is given by `serve`


def serve(route: Any) -> None:
    path = "/" + route.request.url.removeprefix(ADDRESS)
    file = FILES.get(path)
    if path == "/uplot.js":  # as in a bundle, the one module that is made of another file
        route.fulfill(body=sources()["uplot"], content_type=KINDS[".js"])
    elif file is None:
        route.fulfill(status=404, body="")
    else:
        route.fulfill(body=file.read_bytes(), content_type=KINDS[file.suffix])


@pytest.fixture(scope="module")
def tab(chromium: Any) -> Iterator[Any]:
    """The one tab of a module's tests: a browser takes longer to make one than to load it anew."""
    context = chromium.new_context(viewport=ROOM, accept_downloads=True)
    tab = context.new_page()
    tab.route("**/*", serve)
    yield tab
    context.close()


@pytest.fixture
def page(tab: Any) -> Iterator[Any]:
    """An empty page with the modules loaded as `panel`; errors of its scripts fail the test."""
    errors: list[str] = []

    def record_error(error: Any) -> None:
        errors.append(str(error))

    tab.on("pageerror", record_error)
    tab.set_viewport_size(ROOM)
    tab.emulate_media(color_scheme="light")
    tab.goto(ADDRESS)
    tab.wait_for_function("window.ready === true")
    yield tab
    tab.remove_listener("pageerror", record_error)
    assert errors == []


@pytest.fixture
def show(page: Any) -> Any:
    """Draws the panel and gives it messages, and after them what else is named."""

    def _show(messages: list[dict[str, Any]], **more: Any) -> Any:
        page.evaluate("() => { window.start(); }")
        messages = [*messages, {"seq": len(messages) + 1, **more}] if more else messages
        # as text: playwright looks at every number of a value that it hands over, which takes seconds
        page.evaluate("(text) => window.give(...JSON.parse(text))", json.dumps(messages))
        page.wait_for_function("document.querySelector('.anb-name').textContent !== 'run'")
        return page

    return _show
