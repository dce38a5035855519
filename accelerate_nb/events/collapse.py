"""Equal output of several ranks, folded into one."""

import json
import math
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from accelerate_nb.events.event_types import WIDGET_VIEW, Display, LogLine, Shown

# For so many seconds an item waits for the same of other ranks: too short to be noticed.
WINDOW = 0.25
# The two streams of a rank come through two pipes: what is read at one time has no order between them.
_READ_WINDOW = 0.02


class CollapsedOutput(NamedTuple):
    """Output that these ranks, and no others, wrote at this position of their output."""

    ranks: tuple[int, ...]
    item: Shown


class _PendingOutput(NamedTuple):
    key: Hashable
    item: Shown
    came: float


class OutputCollapser:
    """Puts the output of ranks into one order, in which what all put out stands once, and nothing is lost or comes twice."""

    # What every rank has put out comes at once; anything else waits for at most `window` seconds, so that slower ranks can catch up.

    def __init__(self, ranks: Iterable[int], window: float = WINDOW) -> None:
        self._window = window
        self._expected = frozenset(ranks)
        self._queues: dict[int, deque[_PendingOutput]] = {rank: deque() for rank in self._expected}
        self._held: dict[int, Counter[Hashable]] = {rank: Counter() for rank in self._queues}

    def take(self, items: Iterable[Shown], now: float) -> None:
        """Take in what ranks have put out, oldest first; `now` is in seconds of any clock that goes on evenly."""
        for item in items:
            waiting = _PendingOutput(key_of(item), item, now)
            queue = self._queues.setdefault(item.rank, deque())
            self._held.setdefault(item.rank, Counter())[waiting.key] += 1
            index = len(queue)
            # of one read, standard output comes before standard error
            while index and _is_error_before(queue[index - 1].item, item):
                index -= 1
            queue.insert(index, waiting)

    def ready(self, now: float) -> Iterator[CollapsedOutput]:
        """The items that need not wait any longer."""
        while heads := {rank: queue[0] for rank, queue in self._queues.items() if queue}:
            are_equal = self._expected <= heads.keys() and len({head.key for head in heads.values()}) == 1
            if not are_equal and min(head.came for head in heads.values()) + self._window > now:
                return
            yield self._pop(heads)

    def rest(self) -> Iterator[CollapsedOutput]:
        """All that is still there: no more will come."""
        return self.ready(math.inf)

    def _pop(self, heads: Mapping[int, _PendingOutput]) -> CollapsedOutput:
        """The next in order: what other ranks put out only later gives way to what comes before it there."""
        by_key: dict[Hashable, list[int]] = {}
        for rank, head in heads.items():
            by_key.setdefault(head.key, []).append(rank)
        # of what was taken in together, the lowest rank's comes first
        in_order = sorted(by_key, key=lambda key: min((heads[rank].came, rank) for rank in by_key[key]))
        chosen = in_order[0]
        for key in in_order:
            if not any(held[key] > 0 for rank, held in self._held.items() if rank not in by_key[key]):
                chosen = key
                break
        ranks = sorted(by_key[chosen])
        for rank in ranks:
            self._queues[rank].popleft()
            self._held[rank][chosen] -= 1
        return CollapsedOutput(tuple(ranks), heads[ranks[0]].item)


def folded(items: Iterable[Shown]) -> list[CollapsedOutput]:
    """Items that stand side by side, such as progress bars: equal ones once, in the order of their first ranks."""
    by_key: dict[Hashable, list[Shown]] = {}
    for item in items:
        by_key.setdefault(key_of(item), []).append(item)
    return [CollapsedOutput(tuple(sorted({entry.rank for entry in group})), group[0]) for group in by_key.values()]


def is_text(display: Display) -> bool:
    """Whether a notebook can show nothing of it but its text, and will not replace it later."""
    return not display.name and set(display.data) <= {"text/plain", WIDGET_VIEW}


def key_of(item: Shown) -> Hashable:
    """The key that two items share if a person would see the same."""
    if isinstance(item, LogLine):
        return item.stream, item.text
    if is_text(item):
        return "result", str(item.data.get("text/plain", ""))
    return "display", json.dumps(item.data, sort_keys=True, default=str), item.rank if item.update else None


def _is_error_before(before: Shown, item: Shown) -> bool:
    """Whether a line of standard error was read together with one of standard output."""
    if not (isinstance(before, LogLine) and isinstance(item, LogLine)):
        return False
    return (before.stream, item.stream) == ("stderr", "stdout") and item.time - before.time < _READ_WINDOW
