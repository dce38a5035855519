"""The names of metrics: those that code logged, and those that a rank reports by itself."""

from __future__ import annotations

from collections.abc import Iterable

# The prefixes of what `runtime/observability/step_metrics.py` reports; `epoch` is where in the training a step is.
AUTOMATIC_PREFIXES = ("speed/", "optimizer/", "memory/")
EPOCH = "epoch"
# Of these each rank reports its own part: all ranks together have the sum. Of any other number, whatever it is called, the mean is shown.
SUMMED = frozenset({"speed/samples_per_s", "speed/tokens_per_s"})


def is_automatic(name: str) -> bool:
    """Whether a rank reports a metric of this name without being asked to."""
    return name == EPOCH or name.startswith(AUTOMATIC_PREFIXES)


def logged_names(names: Iterable[str]) -> list[str]:
    """The different names that code logged, in the order of their first coming."""
    return [name for name in dict.fromkeys(names) if not is_automatic(name)]


def in_order(names: Iterable[str]) -> list[str]:
    """
    The different names that have a curve: first what code logged, then what ranks report by themselves.

    >>> in_order(["speed/step_time_s", "loss", "epoch"])
    ['loss', 'speed/step_time_s']
    """
    return sorted((name for name in dict.fromkeys(names) if name != EPOCH), key=is_automatic)
