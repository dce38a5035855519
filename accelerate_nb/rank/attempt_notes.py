"""Notes that the ranks of a run leave in its folder, for its next attempt."""

import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from accelerate_nb.config.environment import attempt_of

_FILE = "attempt_notes.jsonl"


def leave_note(topic: str, **facts: Any) -> None:
    """Leave plain values under a topic, each once; a process that this package did not launch leaves none."""
    if (attempt := attempt_of(os.environ)) is None:
        return
    folder, number = attempt
    line = json.dumps({"topic": topic, "attempt": number, **facts}) + "\n"
    _append_once(folder / _FILE, line)


@cache
def _append_once(path: Path, line: str) -> None:
    # a training of hours is worth more than its notes
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # one write, and no buffer: lines of several ranks don't mix, and it stays whatever becomes of this process
            os.write(file, line.encode())
        finally:
            os.close(file)


def notes(topic: str, *, former: bool) -> list[dict[str, Any]]:
    """The notes of a topic, oldest first; with `former` only those of attempts before this one, which all ranks read alike."""
    if (attempt := attempt_of(os.environ)) is None:
        return []
    folder, number = attempt
    try:
        lines = (folder / _FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = [note for line in lines if (note := _read(line)).get("topic") == topic]
    return [note for note in found if not former or note["attempt"] < number]


def _read(line: str) -> dict[str, Any]:
    try:
        note = json.loads(line)
    except ValueError:
        # a full disk, or a process that was killed, has cut it off
        return {}
    return note if isinstance(note, dict) and isinstance(note.get("attempt"), int) else {}
