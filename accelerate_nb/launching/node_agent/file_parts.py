"""A file of another machine, fetched in parts over the channel of its agent."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from accelerate_nb.transport.messages import RankLog

# Reads a file of a rank from an offset on, so many bytes at most; `None` where its node does not reply.
ReadPart: TypeAlias = Callable[[int, int], RankLog | None]

# Short enough for the messages of ranks that follow.
_AT_ONCE = 1 << 20


def fetched(path: Path, read: ReadPart, most: int, deadline: float) -> bool:
    """Fetch what was not fetched before into a file, since the other only grows; whether it has all, within the limits."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with path.open("ab") as file:
            while time.monotonic() < deadline:
                part = read(file.tell(), _AT_ONCE)
                if part is None or not file.tell() <= part.size <= most:
                    return False
                file.write(part.data)
                if file.tell() >= part.size:
                    return True
                if not part.data:
                    return False
    return False
