"""The word that a person probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """
    A question that names the known word nearest to one that nobody knows; `otherwise` where none is near.

    >>> meant("--num-proceses", ["--num-processes", "--cpu"]), meant("--xyz", ["--cpu"], "Leave it out.")
    ('Did you mean --num-processes?', 'Leave it out.')
    """
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {near[0]}?" if near else otherwise
