"""Signals to a command that waits for a run: its workers end before it does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from accelerate_nb.launching.attempt import Stop
from accelerate_nb.launching.run import Run

# An interrupt is Python's own; these ask to end in good order, a second time at once.
_ENDING = ("SIGTERM", "SIGHUP")
_STEPS: tuple[Stop, ...] = ("finish", "interrupt", "kill")


@contextmanager
def handed_on(run: Run) -> Iterator[list[int]]:
    """
    Inside the block a signal that would end this process asks the run to end; gives the signals that have come.

    The first lets all ranks stop after the same step, the next interrupts them, one more kills them. A signal that is
    ignored (`nohup`) stays so.
    """
    heard: list[int] = []

    def hand_on(number: int, _: FrameType | None) -> None:
        how = _STEPS[min(len(heard), len(_STEPS) - 1)]
        heard.append(number)
        # not here: this thread may hold a lock that the run needs
        threading.Thread(target=run.ask, args=(how,), name="accelerate_nb signal", daemon=True).start()

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in _ENDING:
            number = getattr(signal, name)
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, hand_on)
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
