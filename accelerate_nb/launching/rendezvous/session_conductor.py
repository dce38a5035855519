"""Node 0's part in a session of several nodes: all of them learn the same things, in one order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import (
    BreakGroups,
    EndSession,
    Message,
    RebuildGroups,
)


class SessionConductor:
    """
    Takes what the nodes of a session report, and has all of them act on it: those at `channels`, and this one by `on_message`.

    It numbers the generations of process groups. Of failures that come at once the first counts: the others are of a generation that is
    over already. Nodes that rebuild in the same order can't wait for each other in different generations.
    """

    def __init__(self, channels: Sequence[Channel], on_message: Callable[[Message], None]) -> None:
        self._channels, self._on_message = channels, on_message
        self._reports: queue.SimpleQueue[tuple[str, Message] | None] = queue.SimpleQueue()
        threading.Thread(target=self._conduct, name="accelerate_nb sessions", daemon=True).start()

    def take(self, node: str, report: Message) -> None:
        """Take the report of a node, from any thread."""
        self._reports.put((node, report))

    def close(self) -> None:
        """End: nothing is reported any more."""
        self._reports.put(None)

    def _conduct(self) -> None:
        generation, is_over = 0, False
        while (item := self._reports.get()) is not None:
            match item:
                case (node, BreakGroups(broken, reason)) if broken == generation and not is_over:
                    generation += 1
                    self._send(RebuildGroups(generation, node, reason))
                case (_, EndSession() as end) if not is_over:
                    is_over = True
                    self._send(end)

    def _send(self, message: Message) -> None:
        for channel in self._channels:
            channel.try_send(message)
        self._on_message(message)
