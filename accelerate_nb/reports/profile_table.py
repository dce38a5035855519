"""A profile of steps in words and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accelerate_nb.events.model import StepProfile
from accelerate_nb.events.rank_state import RankSummary
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.reports.number_format import counted, ranks_text, value_text
from accelerate_nb.reports.size_limits import narrowed

COLUMNS = ("operation", "calls", "self time", "share")
_WIDEST = 80
_MOST_IN_A_LINE = 3


@dataclass(frozen=True, slots=True)
class ProfileTable:
    """The newest profile of a run: its head, its costliest operations in a row each (`COLUMNS`), and where its trace is."""

    head: str
    rows: tuple[tuple[str, str, str, str], ...]
    trace: str


def newest_profile(ranks: Sequence[RankSummary]) -> tuple[StepProfile, tuple[int, ...]] | None:
    """The newest profile of the first rank that has one, and all ranks that have it; `None` where no rank was profiled."""
    profiles = [rank.profile for rank in ranks if rank.profile is not None]
    if not profiles:
        return None
    number = max(profile.number for profile in profiles)
    # one with a table before those without
    newest = sorted((item for item in profiles if item.number == number), key=lambda item: bool(item.problem))
    return newest[0], tuple(sorted(item.rank for item in newest))


def profile_table(ranks: Sequence[RankSummary]) -> ProfileTable | None:
    """The table of the newest profile; of several ranks, the first one's."""
    if (found := newest_profile(ranks)) is None:
        return None
    profile, profiled = found
    others = f" (profiled: ranks {ranks_text(profiled)})" if len(profiled) > 1 else ""
    return ProfileTable(profile_head(profile) + others, tuple(map(_row, profile.operations)), profile.trace)


def profile_head(profile: StepProfile) -> str:
    """A profile in a line: `rank 0, profile of 10 steps: 52 ms a step, costliest operations on the CPU`."""
    if profile.problem:
        return f"rank {profile.rank} was not profiled: {narrowed(plain(profile.problem), 300)}"
    device = profile.operations[0].device.upper() if profile.operations else "CPU"
    each = milliseconds(profile.seconds / max(profile.steps, 1))
    steps = counted(profile.steps, "step")
    return f"rank {profile.rank}, profile of {steps}: {each} a step, costliest operations on the {device}"


def profile_line(profile: StepProfile) -> str:
    """A profile's head with its first operations."""
    first = profile.operations[:_MOST_IN_A_LINE]
    shares = ", ".join(f"{narrowed(plain(item.name), _WIDEST)} {item.share:.0%}" for item in first)
    return " · ".join(filter(None, (profile_head(profile), shares, profile.trace and f"trace: {profile.trace}")))


def milliseconds(seconds: float) -> str:
    """
    A short time in its unit.

    >>> milliseconds(0.0523), milliseconds(2.5)
    ('52.3 ms', '2.5 s')
    """
    return f"{value_text(float(f'{seconds:.3g}'))} s" if seconds >= 1 else f"{float(f'{seconds * 1e3:.3g}'):g} ms"


def _row(operation: tuple[str, int, float, float, str]) -> tuple[str, str, str, str]:
    name, calls, seconds, share, _ = operation
    return narrowed(plain(name), _WIDEST), f"{calls:,}", milliseconds(seconds), f"{share:.1%}"
