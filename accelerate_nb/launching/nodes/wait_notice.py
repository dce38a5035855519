"""What is said on standard error while a launch waits for other machines."""

from __future__ import annotations

import sys
import time

# What is said of a wait, comes after so many seconds.
_QUIET_WAIT = 2.0


class WaitNotice:
    """Says on standard error what is waited for, once that takes some seconds, and again whenever it changes."""

    def __init__(self) -> None:
        self._began, self._said = time.monotonic(), ""

    def say(self, text: str) -> None:
        """Say it, unless it was said."""
        if time.monotonic() - self._began > _QUIET_WAIT and text != self._said:
            self._said = text
            print_notice(text)


def print_notice(text: str) -> None:
    """Write what is waited for on standard error, at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
