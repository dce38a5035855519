"""A worker's `display`, prompts and breakpoints, where there is no screen and no keyboard."""

from __future__ import annotations

import builtins
import sys
import time
from typing import Any, NoReturn

from accelerate_nb.errors import StateError
from accelerate_nb.events.model import Display
from accelerate_nb.rank.event_sink import emit, outlet

_INPUT = builtins.input


def install() -> None:
    """Make `display` send to the notebook, and `input` and `breakpoint` raise with the reason why they can't work."""
    builtins.display = display  # type: ignore[attr-defined]  # IPython puts it there too
    builtins.input = _no_input
    sys.breakpointhook = _no_breakpoint
    shown = sys.modules.get("IPython.core.display_functions")
    if shown is None:
        return
    shown.display = display  # type: ignore[attr-defined]  # what `from IPython.display import display` gives from now on
    sys.modules["IPython.display"].display = display  # type: ignore[attr-defined]


def allow_prompts() -> None:
    """Give `input` and `breakpoint` back to a program that has somebody's standard input, or finds out that it has none."""
    builtins.input = _INPUT
    sys.breakpointhook = sys.__breakpointhook__


def display(*objects: Any, raw: bool = False, metadata: dict[str, Any] | None = None, **_: Any) -> None:
    """
    Show objects in the notebook, under this rank.

    Like `IPython.display.display`, whose other options (`display_id`, `transient`, ...) have no meaning across processes
    and are passed over.
    """
    rank = getattr(outlet(), "rank", 0)
    for shown in objects:
        data, about = (shown, {}) if raw else _formatted(shown)
        emit(Display(rank=rank, data=as_plain(data), metadata={**about, **(metadata or {})}, time=time.time()))


def _formatted(shown: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    from IPython.core.formatters import DisplayFormatter

    formatter = DisplayFormatter()
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", _figure)
    data, about = formatter.format(shown)  # type: ignore[no-untyped-call]
    return data, about


def _figure(figure: Any) -> Any:
    from IPython.core.pylabtools import print_figure

    return print_figure(figure, "png", base64=True)  # type: ignore[no-untyped-call]


def as_plain(data: dict[str, Any]) -> dict[str, Any]:
    """A MIME bundle as JSON can hold it: bytes as base64."""
    import base64

    return {
        kind: base64.b64encode(value).decode() if isinstance(value, bytes) else value for kind, value in data.items()
    }


def _no_input(prompt: object = "", /) -> NoReturn:
    raise StateError(
        f"input({prompt!r}) was called in a worker, which has no keyboard. "
        "Call input() in the notebook, and pass the text as an argument."
    )


def _no_breakpoint(*_: Any, **__: Any) -> NoReturn:
    raise StateError(
        "breakpoint() was reached in a worker, which has no keyboard. "
        "Run with num_processes=1 to debug in the notebook itself, or print what you want to see."
    )
