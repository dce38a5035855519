"""Which lines of a rank are the drawing of a bar that is known as `Progress` already."""

from __future__ import annotations

import re
from collections.abc import Iterable

from accelerate_nb.events.model import LogLine, Progress

# What tqdm draws where nobody asked for another format: ` 40%|####  | 4/10 [00:01<00:02, 3.1it/s]`, without a total `4it [00:01, ...`.
_METER = re.compile(r"(\d+%\|.*\| *\S+/\S+|\d\S*) \[\d[\d:]*(<|, )")


def draws_a_bar(line: LogLine, bars: Iterable[Progress]) -> bool:
    """
    Whether an open line is one of the bars of its rank, so that who shows those need not show the line too.

    Every tqdm bar in a worker is a `Progress` (`launching/bars.py`), and still drawn as text: an open line of its rank's
    standard error, which stays in the rank's log.

    >>> bar = Progress(0, "epoch 1", 4, 10, time=0.0)
    >>> draws_a_bar(LogLine(0, "stderr", "epoch 1:  40%|####  | 4/10 [00:01<00:02, 3.1it/s]", 0.0, open=True), [bar])
    True
    """
    return line.open and _METER.search(line.text) is not None and any(bar.rank == line.rank for bar in bars)
