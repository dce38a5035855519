"""The part of a panel's messages that is about what ranks report of their training: their memory, their profiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from msgspec import structs

from accelerate_nb.events.model import (
    MemoryUse,
    ProfileRequested,
    StepProfile,
)
from accelerate_nb.events.rank_state import RankSummary
from accelerate_nb.reports.memory_parts import memory_parts, memory_text

_Profiles: TypeAlias = tuple[ProfileRequested | None, StepProfile | None]


class RankFactsFeed:
    """Follows the memory and the profiles of ranks for one panel: `news()` holds the changes since the last call."""

    def __init__(self) -> None:
        self._memory: dict[int, MemoryUse] = {}
        self._profiles: dict[int, _Profiles] = {}

    def news(self, ranks: Sequence[RankSummary]) -> dict[str, list[Any]]:
        """
        `memory` as rank, bytes of each part (`MEMORY_PARTS`), those of the whole device or `None`, and all of it in words.

        `profiles` as rank, the steps of a profile that is under way or `None`, and the newest profile or `None`.
        """
        return {"memory": [*self._new_memory(ranks)], "profiles": [*self._new_profiles(ranks)]}

    def _new_memory(self, ranks: Sequence[RankSummary]) -> Iterator[list[Any]]:
        for rank in ranks:
            if rank.memory is not None and self._memory.get(rank.rank) is not rank.memory:
                self._memory[rank.rank] = rank.memory
                yield [rank.rank, [*memory_parts(rank.memory)], rank.memory.total, memory_text(rank.memory)]

    def _new_profiles(self, ranks: Sequence[RankSummary]) -> Iterator[list[Any]]:
        for rank in ranks:
            requested, profile = now = rank.requested_profile, rank.profile
            if self._profiles.get(rank.rank, (None, None)) != now:
                self._profiles[rank.rank] = now
                yield [rank.rank, requested and requested.steps, profile and structs.asdict(profile)]
