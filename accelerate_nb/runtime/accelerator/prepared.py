"""What one `Accelerator` has prepared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Bundle:
    """The objects that one `Accelerator` has prepared, each kind in the order of their coming."""

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)

    def clear(self) -> None:
        """Let go of everything but what a person registered by hand."""
        for kind in (self.models, self.optimizers, self.schedulers, self.loaders):
            kind.clear()


def add(kind: list[Any], prepared: Any, prepared_for: str = "") -> Any:
    """Keep an object once, and mark it as prepared."""
    if not holds(kind, prepared):
        kind.append(prepared)
    prepared._is_accelerate_prepared = True
    prepared._is_prepared_for = prepared_for
    return prepared


def holds(kind: Iterable[Any], one: Any) -> bool:
    """Whether it is this very object: a person's class may define equality as it likes."""
    return any(each is one for each in kind)


def is_prepared(one: Any, prepared_for: str | None = None) -> bool:
    """Whether an object carries the mark; with `prepared_for`, whether it carries this one."""
    marked = bool(getattr(one, "_is_accelerate_prepared", False))
    return marked and prepared_for in (None, getattr(one, "_is_prepared_for", prepared_for))
