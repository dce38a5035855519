"""Why a run stands still, as far as stacks and collectives tell: which ranks wait in what, and which one is elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from typing import Any, NamedTuple

from accelerate_nb.config.ranks import listed, of_ranks
from accelerate_nb.launching.sources import Sources
from accelerate_nb.launching.stacks import main_thread
from accelerate_nb.launching.tracebacks import below_ours, is_own

_PACKAGE = Path(__file__).parents[1]
# Calls in which a process waits for others, by the file that has them.
_MEETING_FILES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/rendezvous.py",
    "torch/distributed/algorithms/join.py",
    str(_PACKAGE / "runtime/operations/exchange.py"),
    str(_PACKAGE / "runtime/operations/wire.py"),
)
# What stands around a collective in torch's own code, and says nothing.
_WRAPPERS = frozenset({"wrapper", "inner", "_wrapper"})
_WIDEST = 100


@dataclass(frozen=True, slots=True)
class Look:
    """
    Every rank at one moment: what it answered when it was asked where it is, the collectives that are under way in it.

    `returned` are the ranks whose function has ended.
    """

    answers: Mapping[int, str]
    collectives: Mapping[int, Sequence[Mapping[str, Any]]]
    returned: Collection[int] = ()


class Spot(NamedTuple):
    """Where a rank is: the call of the person's code, and the collective in which it waits there, if it is in one."""

    place: str
    source: str
    waits_in: str


def is_at_work(look: Look) -> bool:
    """Whether some rank is in the person's code."""
    return any(_own(below_ours(main_thread(text))) for text in look.answers.values())


def diagnosis(look: Look, sources: Sources) -> str:
    """
    What is to be said of ranks from which nothing comes, a line for all that are in the same place.

    >>> print(diagnosis(look, sources))
    rank 0 waits in all_reduce, at Cell In[3], line 8: dist.all_reduce(x)
    rank 1 is elsewhere, at Cell In[3], line 7: time.sleep(60)
    All ranks have to come to the same collective; rank 1 has not.
    """
    stacks = {rank: below_ours(main_thread(text)) for rank, text in look.answers.items()}
    working = {rank for rank, stack in stacks.items() if _own(stack)}
    spots = {rank: _spot(stacks[rank], look.collectives.get(rank, ()), sources) for rank in stacks if rank in working}
    silent = [rank for rank in stacks if rank not in working]
    lines = [_line(spot, ranks, spots) for spot, ranks in _groups(spots)]
    if silent:
        lines.append(
            f"{of_ranks(sorted(silent), listed)} {'is' if len(silent) == 1 else 'are'} still starting, or can't answer"
        )
    if look.returned:
        lines.append(f"{of_ranks(sorted(look.returned), listed)} {_has(look.returned)} returned already")
    return "\n".join([*lines, *_conclusion(spots, look)])


def _spot(stack: Sequence[FrameSummary], pending: Sequence[Mapping[str, Any]], sources: Sources) -> Spot:
    at = _own(stack)[-1]
    here = stack[at]
    waits = _waits_in(stack[at + 1 :], pending)
    return Spot(sources.place(here.filename, here.lineno or 0), (here.line or "")[:_WIDEST], waits)


def _own(stack: Sequence[FrameSummary]) -> list[int]:
    """Which of these calls are of the person's code; none in a rank that has not come to it yet, or waits for work."""
    return [index for index, frame in enumerate(stack) if is_own(frame.filename)]


def _waits_in(below: Sequence[FrameSummary], pending: Sequence[Mapping[str, Any]]) -> str:
    """The collective that these calls are in, under the name by which the person called it; empty where they are in none."""
    if any(frame.filename.endswith(_MEETING_FILES) for frame in below):
        called = next(frame for frame in below if frame.name not in _WRAPPERS)
        return called.name
    if pending and any(frame.name == "_engine_run_backward" for frame in below):
        return f"backward's {_name(pending[0])}"
    return ""


def _name(collective: Mapping[str, Any]) -> str:
    """`all_reduce` of what the recorder calls `gloo:all_reduce`."""
    return str(collective["name"]).rpartition(":")[2]


def _groups(spots: Mapping[int, Spot]) -> list[tuple[Spot, list[int]]]:
    """The places with their ranks, those where ranks wait first, then by how many are there."""
    found: dict[Spot, list[int]] = {}
    for rank, spot in spots.items():
        found.setdefault(spot, []).append(rank)
    return sorted(found.items(), key=lambda one: (not one[0].waits_in, -len(one[1]), one[1]))


def _line(spot: Spot, ranks: Sequence[int], spots: Mapping[int, Spot]) -> str:
    one = len(ranks) == 1
    if spot.waits_in:
        does = f"{'waits' if one else 'wait'} in {spot.waits_in}"
    elif any(other.waits_in for other in spots.values()):
        does = f"{'is' if one else 'are'} elsewhere"
    else:
        does = "is" if one else "are"
    comma = " " if does in {"is", "are"} else ", "
    source = f": {spot.source}" if spot.source else ""
    return f"{of_ranks(sorted(ranks), listed)} {does}{comma}at {spot.place}{source}"


def _conclusion(spots: Mapping[int, Spot], look: Look) -> list[str]:
    """What follows, where something does."""
    if (differs := _mismatch(look.collectives)) is not None:
        return [differs]
    waiting = [rank for rank, spot in spots.items() if spot.waits_in]
    missing = sorted([*look.returned, *(rank for rank in spots if rank not in waiting)])
    if not waiting or not spots:
        return []
    if missing:
        return [
            f"All ranks have to come to the same collective; {of_ranks(sorted(missing), listed)} {_has(missing)} not."
        ]
    if len(set(spots.values())) > 1:
        return ["All ranks wait, but not in the same call: they have to make the same calls in the same order."]
    return ["All ranks wait in the same call: a slow one, or the connection between them is interrupted."]


def _mismatch(collectives: Mapping[int, Sequence[Mapping[str, Any]]]) -> str | None:
    """The first collective by number that ranks make differently, as torch's flight recorder tells it."""
    found: dict[tuple[str, int], dict[str, list[int]]] = {}
    for rank, pending in sorted(collectives.items()):
        for one in pending:
            calls = found.setdefault((one["group"], one["number"]), {})
            calls.setdefault(f"{_name(one)} of {_sizes(one)}", []).append(rank)
    for (_, number), calls in sorted(found.items(), key=lambda one: one[0][1]):
        if len({call.partition(" of ")[0] for call in calls}) > 1:
            said = ", but ".join(f"{call} on {of_ranks(sorted(ranks), listed)}" for call, ranks in calls.items())
            return f"Collective number {number} is {said}: all ranks have to make the same calls in the same order."
    return None


def _sizes(collective: Mapping[str, Any]) -> str:
    return " and ".join("×".join(map(str, size)) or "one number" for size in collective["sizes"]) or "nothing"


def _has(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
