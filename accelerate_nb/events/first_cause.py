"""The first cause among several failures."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from accelerate_nb.events.model import Failure

_LOST_LINE = re.compile(r"connection (closed|reset)|broken pipe|socket closed", re.IGNORECASE)


def cause(failures: Sequence[Failure]) -> Failure:
    """
    The failure that led to the others.

    One that only lost its connection to another rank, or was ended because of one, is a consequence; of the rest, the
    first in time.
    """
    return min(failures, key=lambda item: (item.ended_by_us, item.lost_connection, _was_aborted(item), item.time))


def _was_aborted(failure: Failure) -> bool:
    """C++ code calls abort at an exception that nothing catches, a lost connection for one."""
    return failure.exit_code == -signal.SIGABRT and any(_LOST_LINE.search(line) for line in failure.last_lines)
