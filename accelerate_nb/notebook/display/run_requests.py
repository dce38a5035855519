"""The requests of pages that take a run a while: stacks, knobs, profiles and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.launching.front_end import RunHandle
from accelerate_nb.notebook.display.message_feed import Message

# A message to pages, with the bytes that it carries.
Reply: TypeAlias = tuple[Message, list[bytes]]

_MOST_OF_A_FILE = 64 * 1024 * 1024


class RunRequests:
    """Carries out the requests of a run's pages; each gives the message that replies, or none."""

    def __init__(self, run: RunHandle) -> None:
        self._run = run
        self._takes_stacks = False

    def reply(self, content: Message) -> Reply | None:
        """Carry out a request; the reply to it."""
        match content:
            case {"do": "stacks"}:
                return self._stacks()
            case {"do": "knob"}:
                return self._knob(content.get("name"), content.get("value"))
            case {"do": "profile"}:
                return self._profile(content.get("ranks"))
            case {"do": "trace", "rank": int(rank)}:
                return self._trace(rank)
            case {"do": "log", "rank": int(rank)}:
                path = self._run.log_file(rank)
                return {"file": {"name": path.name}}, [end_of(path, _MOST_OF_A_FILE)]
        return None

    def _stacks(self) -> Reply | None:
        if self._takes_stacks:
            return None
        self._takes_stacks = True
        try:
            text = self._run.stacks() or "No rank runs any more."
        finally:
            self._takes_stacks = False
        return {"stacks": {"text": text}}, []

    def _knob(self, name: Any, value: Any) -> Reply | None:
        try:
            self._run.set_knob(str(name), value)
        except AccelerateNbError as error:
            return {"knob_error": {"name": name, "text": str(error)}}, []
        return None

    def _profile(self, ranks: Any) -> Reply | None:
        try:
            self._run.profile(ranks=ranks)
        except AccelerateNbError as error:
            return {"profile_error": str(error)}, []
        return None

    def _trace(self, rank: int) -> Reply | None:
        if (profile := self._run.view.rank(rank).profile) is None:
            return None
        path = self._run.folder / Path(profile.trace).name
        if not path.is_file():
            text = f"The trace of rank {rank} is not in the run's folder on this machine; it was written to {profile.trace}"
        elif path.stat().st_size > _MOST_OF_A_FILE:
            text = f"The trace of rank {rank} is too large for a page. It is in {path}"
        else:
            return {"file": {"name": path.name}}, [path.read_bytes()]
        return {"profile_error": text}, []


def end_of(path: Path, most: int) -> bytes:
    """A file's last bytes, after a line that names the omission where they are not all."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            left_out = max(size - most, 0)
            file.seek(left_out)
            data = file.read(most)
    except FileNotFoundError:
        return b""
    if not left_out:
        return data
    return f"... the first {left_out:,} bytes are left out here; all of it is in {path} ...\n".encode() + data
