"""The diagnosis of a hang from stacks and collectives: which ranks wait in what, and which one is elsewhere."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from typing import Any, NamedTuple

from accelerate_nb.config.rank_lists import listed, of_ranks
from accelerate_nb.failures.stack_dumps import is_state, main_thread, stacks_text
from accelerate_nb.failures.traceback_format import below_ours
from accelerate_nb.sources.cells import CellSources
from accelerate_nb.sources.installed_packages import is_user_file

_PACKAGE = Path(__file__).parents[1]
# Calls in which a process waits for others, by the file that has them.
_COLLECTIVE_FILES = (
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/elastic/utils/store.py",
    "torch/distributed/rendezvous.py",
    "torch/distributed/algorithms/join.py",
    str(_PACKAGE / "runtime/operations/transfer.py"),
)
# Files of torch in which a process waits for what its recorder shows.
_OF_TORCH = re.compile(r"/torch/(distributed/|nn/parallel/distributed\.py)")
# A wait for keys of a store, which leaves no frame of its own.
_STORE_CALL, _STORE_WAIT = re.compile(r"store\.wait\(|\.wait\(\["), "store.wait"
# Functions around a collective in torch's own code, of no interest to a reader.
_WRAPPERS = frozenset({"wrapper", "inner", "_wrapper"})
_WIDEST = 100


@dataclass(frozen=True, slots=True)
class StackSnapshot:
    """Every rank at one moment: its stack dump, and the collectives that are under way in it."""

    # of a process that can't write one its state (`process_state`), or nothing
    replies: Mapping[int, str]
    collectives: Mapping[int, Sequence[Mapping[str, Any]]]
    returned: Collection[int] = ()


class RankPosition(NamedTuple):
    """A rank's position: the call of the person's code, and the collective in which it waits there, if it is in one."""

    location: str
    source: str
    waits_in: str


def is_at_work(snapshot: StackSnapshot) -> bool:
    """Whether some rank is in the person's code, or its process stands still."""
    return any(_user_frames(below_ours(main_thread(text))) or is_state(text) for text in snapshot.replies.values())


def waits_for_returned(snapshot: StackSnapshot) -> bool:
    """Whether all ranks that run wait for others, among them one that has returned: they will never go on."""
    returned, waits_for_one = set(snapshot.returned), False
    for rank, position in _rank_positions(snapshot, CellSources({}, {})).items():
        entries = snapshot.collectives.get(rank, ())
        meets = any(not returned.isdisjoint(entry.get("awaited", ())) for entry in entries)
        # on such a device nothing waits in Python, and what others have to come to is under way all the same
        is_on_device = meets and any(str(entry.get("name")).startswith("nccl:") for entry in entries)
        if position is None or not (position.waits_in or is_on_device):
            return False
        waits_for_one |= meets or position.waits_in == _STORE_WAIT
    return bool(returned) and waits_for_one


def diagnosis(snapshot: StackSnapshot, sources: CellSources) -> str:
    """Describe ranks from which nothing comes, a line for all that are in the same place, and who is missing."""
    every = _rank_positions(snapshot, sources)
    rank_positions = {rank: position for rank, position in every.items() if position is not None}
    places: dict[RankPosition, list[int]] = {}
    for rank, position in rank_positions.items():
        places.setdefault(position, []).append(rank)
    # those where ranks wait first, then by how many are there
    in_order = sorted(places.items(), key=lambda place: (not place[0].waits_in, -len(place[1]), place[1]))
    lines = [_line(position, ranks, places) for position, ranks in in_order]
    frozen = {rank: snapshot.replies[rank] for rank in sorted(every) if is_state(snapshot.replies[rank])}
    lines += [f"rank {rank} does not answer: {state}" for rank, state in frozen.items()]
    if silent := sorted(every.keys() - rank_positions.keys() - frozen.keys()):
        is_or_are = "is" if len(silent) == 1 else "are"
        lines.append(f"{of_ranks(silent, listed)} {is_or_are} still starting, or can't answer")
    if snapshot.returned:
        lines.append(f"{of_ranks(sorted(snapshot.returned), listed)} {_has(snapshot.returned)} returned already")
    return "\n".join([*lines, *_conclusion(rank_positions, snapshot)])


def snapshot_text(snapshot: StackSnapshot, sources: CellSources) -> str:
    """A snapshot as text: the diagnosis, then every stack."""
    if not snapshot.replies:
        return ""
    return f"{diagnosis(snapshot, sources)}\n\n{stacks_text(snapshot.replies, sources)}"


def _rank_positions(snapshot: StackSnapshot, sources: CellSources) -> dict[int, RankPosition | None]:
    """The position of every rank; `None` for one that is not in the person's code, or did not answer."""
    positions: dict[int, RankPosition | None] = {}
    for rank, text in snapshot.replies.items():
        stack = below_ours(main_thread(text))
        pending = [entry for entry in snapshot.collectives.get(rank, ()) if "number" in entry]
        positions[rank] = None
        for at in _user_frames(stack)[-1:]:
            frame, line = stack[at], stack[at].line or ""
            location = sources.location(frame.filename, frame.lineno or 0)
            positions[rank] = RankPosition(location, line[:_WIDEST], _waits_in(line, stack[at + 1 :], pending))
    return positions


def _user_frames(stack: Sequence[FrameSummary]) -> list[int]:
    """The indices of calls of the person's code; none in a rank that has not come to it yet, or waits for work."""
    return [index for index, frame in enumerate(stack) if is_user_file(frame.filename)]


def _waits_in(line: str, below: Sequence[FrameSummary], pending: Sequence[Mapping[str, Any]]) -> str:
    """The collective in which a line of the person's code waits, by the calls below it, under the name by which it called it; or nothing."""
    if not below:
        # it has called compiled code
        if _STORE_CALL.search(line):
            return _STORE_WAIT
        return _name(pending[0]) if pending and ".wait(" in line else ""
    if any(frame.filename.endswith(_COLLECTIVE_FILES) for frame in below):
        return next(frame.name for frame in below if frame.name not in _WRAPPERS)
    if pending and any(frame.name == "_engine_run_backward" for frame in below):
        return f"backward's {_name(pending[0])}"
    file = below[-1].filename
    is_torchs_or_ours = file.startswith(f"{_PACKAGE}{os.sep}") or _OF_TORCH.search(file)
    return below[0].name if pending and is_torchs_or_ours else ""


def _name(collective: Mapping[str, Any]) -> str:
    """`all_reduce` of what the recorder calls `gloo:all_reduce`."""
    return str(collective["name"]).rpartition(":")[2]


def _line(rank_position: RankPosition, ranks: Sequence[int], every: Collection[RankPosition]) -> str:
    is_single = len(ranks) == 1
    if rank_position.waits_in:
        does = f"{'waits' if is_single else 'wait'} in {rank_position.waits_in}"
    elif any(other.waits_in for other in every):
        does = f"{'is' if is_single else 'are'} elsewhere"
    else:
        does = "is" if is_single else "are"
    comma = " " if does in {"is", "are"} else ", "
    source = f": {rank_position.source}" if rank_position.source else ""
    return f"{of_ranks(sorted(ranks), listed)} {does}{comma}at {rank_position.location}{source}"


def _conclusion(rank_positions: Mapping[int, RankPosition], snapshot: StackSnapshot) -> list[str]:
    if (differs := _mismatch(snapshot.collectives)) is not None:
        return [differs]
    waiting = [rank for rank, rank_position in rank_positions.items() if rank_position.waits_in]
    missing = sorted([*snapshot.returned, *(rank for rank in rank_positions if rank not in waiting)])
    if not waiting or not rank_positions:
        return []
    if missing:
        who = f"{of_ranks(missing, listed)} {_has(missing)}"
        return [f"All ranks have to come to the same collective; {who} not."]
    if silent := sorted(snapshot.replies.keys() - rank_positions.keys()):
        is_or_are = "is" if len(silent) == 1 else "are"
        return [f"The others wait. It is not known where {of_ranks(silent, listed)} {is_or_are}."]
    if len(set(rank_positions.values())) > 1:
        return ["All ranks wait, but not in the same call: they have to make the same calls in the same order."]
    return ["All ranks wait in the same call: a slow one, or the connection between them is interrupted."]


def _mismatch(collectives: Mapping[int, Sequence[Mapping[str, Any]]]) -> str | None:
    """The first collective by number that ranks make differently, by torch's flight recorder."""
    found: dict[tuple[str, int], dict[str, list[int]]] = {}
    for rank, pending in sorted(collectives.items()):
        for collective in (entry for entry in pending if "number" in entry):
            calls = found.setdefault((collective["group"], collective["number"]), {})
            sizes = ("×".join(map(str, size)) or "one number" for size in collective["sizes"])
            call = f"{_name(collective)} of {' and '.join(sizes) or 'nothing'}"
            calls.setdefault(call, []).append(rank)
    for (_, number), calls in sorted(found.items(), key=lambda entry: entry[0][1]):
        if len({call.partition(" of ")[0] for call in calls}) > 1:
            text = ", but ".join(f"{call} on {of_ranks(sorted(ranks), listed)}" for call, ranks in calls.items())
            return f"Collective number {number} is {text}: all ranks have to make the same calls in the same order."
    return None


def _has(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
