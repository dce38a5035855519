"""Signals to a process that owns a run: its workers end before it does."""

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

from accelerate_nb.launching.conductor import Conductor
from accelerate_nb.launching.worker_group import Stop

# The exit code of a process whose run a signal stopped after a step that all ranks share, where they could save: run it again, and
# it goes on. EX_TEMPFAIL of sysexits.h ("try again later"); 143 would not distinguish it from a run that was killed by SIGTERM.
STOPPED_AFTER_STEP = 75
# This, and the signal's number: of a run that a signal ended in any other way, as shells give it.
_BY_SIGNAL = 128
# An interrupt is Python's own; these request a graceful end, and a second one an immediate end.
_END_SIGNALS = ("SIGTERM", "SIGHUP")
_STEPS: tuple[Stop, ...] = ("finish", "interrupt", "kill")
# The time that programs with a handler for such a signal get to save, as in torchrun; and the interval of checks.
_EXIT_TIMEOUT, _POLL_INTERVAL = 30.0, 0.2


@contextmanager
def end_on_signals(run: Conductor) -> Iterator[list[int]]:
    """Inside the block a signal that would end this process ends the run first; gives the signals that have come."""
    # The first lets ranks stop after the same step, where a function that checks `Accelerator.stop_requested` saves;
    # the next interrupts them, one more kills them. Programs with a handler of their own, as those that save before a
    # cluster takes their machine away, get the first as it is. One that is ignored (`nohup`) stays so; only the main
    # thread can handle any.
    received: list[int] = []

    def hand_on(number: int, _: FrameType | None) -> None:
        how = _STEPS[min(len(received), len(_STEPS) - 1)]
        received.append(number)
        # not here: this thread may hold a lock that the run needs
        threading.Thread(target=_end, args=(run, number, how), name="accelerate_nb signal", daemon=True).start()

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in _END_SIGNALS:
            number = getattr(signal, name)
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, hand_on)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code_after(signals: list[int], stopped_at: str | None) -> int | None:
    """The exit code of a process that got these signals; `None` where it got none. `stopped_at` is the run's."""
    if not signals:
        return None
    # a second signal cuts off what the first one lets ranks save
    is_saved = len(signals) == 1 and stopped_at is not None
    return STOPPED_AFTER_STEP if is_saved else _BY_SIGNAL + signals[0]


def _end(run: Conductor, number: int, how: Stop) -> None:
    found = [run.view.rank(rank) for rank in run.ranks_here]
    processes = [int(item.detail) for item in found if item.state == "running" and item.detail.isdecimal()]
    if how == "finish" and (handling := [pid for pid in processes if _handles(pid, number)]):
        for pid in handling:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while not run.over.is_set() and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
    run.request_stop(how)


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal, as far as the system shows it."""
    try:
        mask = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)
