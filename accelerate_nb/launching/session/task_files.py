"""A session's requests and replies, each in a memory file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from accelerate_nb.sources.cells import CellSources, current_sources
from accelerate_nb.transport.main_module import is_of_main
from accelerate_nb.transport.memory_file import map_entries, memory_file, write_entries
from accelerate_nb.transport.outcome import unpickling_failure
from accelerate_nb.transport.serializer import dump, load
from accelerate_nb.transport.session_tasks import Task, TaskReply, TaskRequest
from accelerate_nb.transport.unpicklable import explain


def write_request(task: Task | None, parts: Mapping[str, Any] | None = None) -> int:
    """A task request in a memory file; raises `PayloadError` for what of its `parts` can't travel."""
    __tracebackhide__ = True  # IPython shows the person's own frames alone
    sources = current_sources() if parts is not None else CellSources({}, {})
    names: dict[str, Any] = {}
    main_names = list(vars(sys.modules["__main__"]).items())
    try:
        known = frozenset(name for name, value in main_names if is_of_main(value))
        entries = dump(TaskRequest(task, known, sources.lines, sources.numbers, names), names)
    except Exception as error:  # noqa: BLE001 - a pickler calls anybody's code, which may raise anything
        raise explain(parts or {}, error, sources) from None
    descriptor = memory_file("accelerate_nb_request")
    try:
        write_entries(descriptor, entries)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_reply(descriptor: int, rank: int) -> TaskReply:
    """The reply of a rank in its memory file, which is closed; a `Failure` in it where it can't be unpickled."""
    try:
        reply: TaskReply = load(map_entries(descriptor))
    except Exception as error:  # noqa: BLE001 - unpickling runs anybody's code
        return TaskReply(0.0, failure=unpickling_failure(rank, "reply", error), error=error)
    finally:
        os.close(descriptor)
    return reply
