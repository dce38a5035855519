"""Placeholders of objects that one strategy makes."""

from __future__ import annotations

from typing import Any, ClassVar

from accelerate_nb.errors import ConfigurationError


class Placeholder:
    """An object that stands for another one, which a strategy of the name `made_by` makes in `prepare`."""

    made_by: ClassVar[str]


def refuse_placeholder(item: Any) -> None:
    """Raise `ConfigurationError` where an object is a placeholder that this run's strategy has left as it is."""
    if isinstance(item, Placeholder):
        raise ConfigurationError(
            f"prepare was given a {type(item).__name__}, a placeholder of what {item.made_by} makes, in a run that does not train "
            f"with it. Pass strategy={item.made_by.lower()!r}, or an object of your own in its place."
        )
