"""The objects that one `Accelerator` has prepared."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class PreparedObjects:
    """The objects that one `Accelerator` has prepared, each kind in the order of their coming."""

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)

    def clear(self) -> None:
        """Release everything but what was registered by hand."""
        for entries in (self.models, self.optimizers, self.schedulers, self.loaders):
            entries.clear()


def add(entries: list[Any], prepared: Any, prepared_for: Any) -> Any:
    """Keep an object once, and mark it as prepared."""
    if all(entry is not prepared for entry in entries):  # a user's class may define equality as it likes
        entries.append(prepared)
    prepared._is_accelerate_prepared = True
    prepared._is_prepared_for = prepared_for
    return prepared


def is_prepared(item: Any, prepared_for: Any = None) -> bool:
    """Whether an object carries the mark; with `prepared_for`, whether it carries this one."""
    marked = bool(getattr(item, "_is_accelerate_prepared", False))
    return marked and prepared_for in (None, getattr(item, "_is_prepared_for", prepared_for))
