"""Suggestions for a misspelled word."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", prefix: str = "") -> str:
    """
    A question that names the known word nearest to an unknown one; `otherwise` where none is near.

    `prefix` is put before the suggestion, and does not count in the comparison.

    >>> did_you_mean("--num-proceses", ["--num-processes", "--cpu"]), did_you_mean("--xyz", ["--cpu"], "Leave it out.")
    ('Did you mean --num-processes?', 'Leave it out.')
    """
    import difflib  # seldom needed, and slow to import

    # no name is longer, and the comparison takes the square of the length
    near = difflib.get_close_matches(word, list(known), n=1) if len(word) <= 100 else []
    return f"Did you mean {prefix}{near[0]}?" if near else otherwise
