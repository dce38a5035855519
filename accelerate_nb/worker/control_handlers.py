"""What a worker answers the kernel while its function runs, from the thread that hears: how far it is, and where."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from accelerate_nb.events.asks import current_asks
from accelerate_nb.launching.inbox import Inbox, Message

# More of them than are told would fill the pipe.
_MOST_COLLECTIVES = 20


def answer(told: Inbox) -> None:
    """From now on the kernel's questions are answered; what was asked of the process that this one was forked from is not."""
    current_asks().reset()
    told.on("hold", _hold)
    told.on("until", _until)
    told.on("collectives", _collectives)


def _hold(_: Message, descriptors: Sequence[int]) -> None:
    _reply(descriptors, current_asks().hold())


def _until(message: Message, _: Sequence[int]) -> None:
    current_asks().until(message["steps"], raises=message["raises"])


def _collectives(_: Message, descriptors: Sequence[int]) -> None:
    _reply(descriptors, recorded()[-_MOST_COLLECTIVES:])


def _reply(descriptors: Sequence[int], said: Any) -> None:
    (pipe,) = descriptors
    # nobody may wait for it any more
    with suppress(BrokenPipeError), open(pipe, "w", encoding="utf-8") as file:
        json.dump(said, file)


def recorded() -> list[dict[str, Any]]:
    """The collectives that torch's flight recorder says are under way here, oldest first; none where torch has no such thing."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            entries += json.loads(dump(includeCollectives=True, onlyActive=True) or b"{}").get("entries", [])
    return [
        {
            "group": one["process_group"][0],
            "number": one["collective_seq_id"],
            "name": one["profiling_name"],
            "sizes": one["input_sizes"],
        }
        for one in entries
        if not one["retired"]
    ]
