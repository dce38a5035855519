"""The reports of an agent on their way to the worker group: what can wait for the next of them goes with it, in one message."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import cast

from msgspec import structs

from accelerate_nb.events.model import DeviceSample, MemoryUse, Metric, Progress, StepBreakdown
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import (
    Message,
    RankEvent,
    RankOutput,
    RankReport,
    RankReports,
)

# Output and measurements are sent at most this often, in seconds: a panel shows them no more often.
BETWEEN_SENDS = 0.1
# In larger worlds less often: what the ranks of many nodes write is the work of one process.
_RANKS_AT_ONCE = 4096
_LONGEST_BETWEEN = 0.5
# More bytes of output don't wait: they would fill the memory, or a message.
_MOST_OUTPUT = 2 << 20
_CAN_WAIT = (DeviceSample, MemoryUse, Metric, Progress, StepBreakdown)


class ReportSender:
    """
    Sends reports in their order. Output and measurements wait up to `BETWEEN_SENDS`, unless nothing was sent for so long; others don't.

    >>> sender = ReportSender(channel)
    >>> sender.send(RankOutput(0, 0, b"a line", ()))
    >>> loop.wait(sender.tick(time.monotonic(), 1.0))
    """

    def __init__(self, channel: Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._clock = channel, clock
        self._collected: list[Message] = []
        self._output = 0
        self._next = float("-inf")
        self._between = BETWEEN_SENDS

    def begin(self, world_size: int) -> None:
        """Reports of a world of so many ranks follow. In a large one, what a rank writes meanwhile becomes one report."""
        self._between = min(max(BETWEEN_SENDS, world_size / _RANKS_AT_ONCE), _LONGEST_BETWEEN)

    def send(self, report: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a report, at the latest in a later `tick`; its descriptors are closed."""
        if descriptors:
            self.flush()
            self._channel.try_send(report, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            return
        self._collected.append(report)
        if isinstance(report, RankOutput):
            self._output += len(report.raw)
        if self._output > _MOST_OUTPUT or not _can_wait(report):
            self.flush()

    def tick(self, now: float, timeout: float) -> float:
        """Send what is due, on the clock; returns the seconds until something is, at most `timeout`."""
        if not self._collected:
            return timeout
        if now >= self._next:
            self.flush()
            return timeout
        return min(timeout, self._next - now)

    def flush(self) -> None:
        """Send what has waited."""
        reports, self._collected, self._output = self._collected, [], 0
        if self._between > BETWEEN_SENDS:
            reports = _joined(reports)
        if reports:
            # where the other end has gone, that ends the loop
            self._channel.try_send(
                reports[0] if len(reports) == 1 else RankReports(cast("tuple[RankReport, ...]", tuple(reports)))
            )
            self._next = self._clock() + self._between


def _joined(reports: Sequence[Message]) -> list[Message]:
    """Reports in their order, where the outputs of a rank between which it reported nothing else are one: it has the number of the last."""
    found: list[Message] = []
    # where the last report of each rank is
    places: dict[int | None, int] = {}
    for report in reports:
        rank = getattr(report, "rank", None)
        former = found[places[rank]] if rank in places else None
        if isinstance(report, RankOutput) and isinstance(former, RankOutput) and not report.left_out:
            raw, lines = former.raw + report.raw, former.lines + report.lines
            found[places[rank]] = structs.replace(former, number=report.number, raw=raw, lines=lines)
        else:
            places[rank] = len(found)
            found.append(report)
    return found


def _can_wait(report: Message) -> bool:
    return isinstance(report, RankOutput) or (isinstance(report, RankEvent) and isinstance(report.event, _CAN_WAIT))
