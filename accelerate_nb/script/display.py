"""Displays of a notebook as text: the value of a cell's last line, and the objects of `display`."""

import builtins
from typing import Any

# What fits on one line is written by IPython as by Python itself.
_WIDEST = 79
_SIMPLE = (bool, int, float, complex, str, bytes, type(None))


def shown(value: Any) -> None:
    """Show the value of a cell's last line, as a notebook does: nothing for None."""
    if value is not None:
        display(value)


def display(*objects: Any, **options: Any) -> Any:
    """Show objects: in a notebook, or in the panel of a run, where this script runs in one, and as text anywhere else."""
    # takes what IPython's `display` takes; with `display_id`, gives an object whose `update` shows something else
    other = getattr(builtins, "display", None)
    if other is not None:
        return other(*objects, **options)
    for object_ in objects:
        print(text_of(object_))
    return DisplayHandle() if options.get("display_id") is not None else None


class DisplayHandle:
    """A display that can be updated: its new text is printed below, since printed text stays."""

    def display(self, obj: Any, **_: Any) -> None:
        """Show an object."""
        display(obj)

    update = display


def text_of(value: Any) -> str:
    """The text of a display; a figure is a line with its size."""
    if _is_simple(value) and len(text := repr(value)) <= _WIDEST:
        return text
    # IPython takes a third of a second to import, so it is for values that need it
    from IPython.core.formatters import PlainTextFormatter

    if type(value).__module__ == "IPython.core.display" and type(value).__name__ in ("Markdown", "Latex", "Code"):
        return str(value.data)
    return str(PlainTextFormatter()(value))


def _is_simple(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_simple, value))
    if type(value) is dict:
        return all(map(_is_simple, (*value.keys(), *value.values())))
    return type(value) in _SIMPLE
