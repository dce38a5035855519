"""The part of a panel's messages that is about the memory of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate_nb.events.model import MemoryUse
from accelerate_nb.events.rank_state import RankSummary
from accelerate_nb.reports.memory_parts import memory_parts, memory_text


class MemoryFeed:
    """Follows the memory of ranks for one panel: `news()` holds the changes since the last call."""

    def __init__(self) -> None:
        self._sent: dict[int, MemoryUse] = {}

    def news(self, ranks: Sequence[RankSummary]) -> list[list[Any]]:
        """Rank, bytes of each part (`MEMORY_PARTS`), those of the whole device or `None`, and all of it in words."""
        found = []
        for rank in ranks:
            if rank.memory is not None and self._sent.get(rank.rank) is not rank.memory:
                self._sent[rank.rank] = rank.memory
                found.append([rank.rank, [*memory_parts(rank.memory)], rank.memory.total, memory_text(rank.memory)])
        return found
