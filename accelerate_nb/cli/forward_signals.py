"""Signals to a command that waits for a run: its workers end before it does."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate_nb.launching.attempt import Stop
from accelerate_nb.launching.run import Run

# An interrupt is Python's own; these ask to end in good order, a second time at once.
_ENDING = ("SIGTERM", "SIGHUP")
_STEPS: tuple[Stop, ...] = ("finish", "interrupt", "kill")
# How long programs that handle such a signal themselves may take to save, as torchrun has it; and between two looks at them.
_OWN_TIME, _BETWEEN_LOOKS = 30.0, 0.2


@contextmanager
def handed_on(run: Run) -> Iterator[list[int]]:
    """
    Inside the block a signal that would end this process asks the run to end; gives the signals that have come.

    The first lets all ranks stop after the same step, the next interrupts them, one more kills them. Programs that handle
    the signal themselves, as those do that save before a cluster takes their machine away, get the first one as it is, and
    have time to end. A signal that is ignored (`nohup`) stays so.
    """
    heard: list[int] = []

    def hand_on(number: int, _: FrameType | None) -> None:
        how = _STEPS[min(len(heard), len(_STEPS) - 1)]
        heard.append(number)
        # not here: this thread may hold a lock that the run needs
        threading.Thread(target=_end, args=(run, number, how), name="accelerate_nb signal", daemon=True).start()

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


def _end(run: Run, number: int, how: Stop) -> None:
    if how == "finish" and (own := [pid for pid in _processes(run) if _handles(pid, number)]):
        for pid in own:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + _OWN_TIME
        while not run.done and time.monotonic() < deadline:
            time.sleep(_BETWEEN_LOOKS)
    run.ask(how)


def _processes(run: Run) -> list[int]:
    """The process numbers of the ranks that run."""
    ranks = [run.view.rank(rank) for rank in run.view.ranks]
    return [int(one.detail) for one in ranks if one.state == "running" and one.detail.isdecimal()]


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal, as far as the system tells."""
    try:
        told = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return told is not None and bool(int(told[1], 16) >> (number - 1) & 1)
