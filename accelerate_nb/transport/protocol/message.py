"""The base of the messages between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Message:
    """
    The base of every message. Another one is a frozen dataclass below it, and a line in `TAGS`.

    Its fields are numbers, texts, bytes, truth values, `None`, tuples of these, mappings by name, frozen dataclasses of these, or
    another message. `carries` is the number of descriptors that come with it; `None` stands for any.
    """

    carries: ClassVar[int | None] = 0
