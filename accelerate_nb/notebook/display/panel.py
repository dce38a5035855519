"""The live panel of one run: a widget, with what its pages are told and what they ask."""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from accelerate_nb.launching.run import Watched
from accelerate_nb.notebook.live.feed import Feed, Message
from accelerate_nb.notebook.live.lane import Lane
from accelerate_nb.notebook.live.outputs import Bundle
from accelerate_nb.notebook.page import joining
from accelerate_nb.reports.facts import Facts

# How long a page may leave what it was told unanswered before it is told no more; all at once takes it longer.
_PATIENCE = 3.0
_PATIENCE_WITH_ALL = 20.0
_MOST_OF_A_LOG = 64 * 1024 * 1024


class Panel(anywidget.AnyWidget):
    """The widget: the modules of `page` draw it from the messages that it is sent; `snapshot` is for a page without a kernel."""

    _esm = joining.module()
    _css = joining.style()
    snapshot: Any = traitlets.List().tag(sync=True)


class LivePanel:
    """
    A run's panel, and its conversation with the pages that show it.

    Every page says hello when it draws the panel, and is told everything so far; then `step`, called about ten times a
    second from one thread or several, tells what is new in one message. Where no page answers any more it holds back.

    >>> live = LivePanel(run, "jupyter", lane, background=False)
    >>> while not run.done: live.step()
    >>> live.end(report)
    """

    def __init__(
        self, run: Watched, host: str, lane: Lane, *, background: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._lane, self._clock = run, lane, clock
        self._panel = Panel()
        self._inbox: deque[Message] = deque()
        self._outbox: deque[tuple[Message, list[bytes]]] = deque()
        self._panel.on_msg(self._hear_after_all)
        self._comm = str(self._panel.model_id)
        # a background run's cell is over soon, and then the kernel brings the clicks by itself
        can_act = lane.join(self._comm, self._inbox.append) or background
        self.facts = Facts.of(run, host, background=background, can_act=can_act)
        self._feed = Feed(run.view)
        self._lock = threading.RLock()
        self._unanswered: deque[tuple[int, float]] = deque()
        self._holds_back = self._ended = self._was_asked = self._looks_for_stacks = False
        self._needs_all = False
        self._report: Bundle | None = None
        self._was_loaded_anew = False
        self.answered = False

    def bundle(self) -> Bundle:
        """What makes a page draw the panel."""
        data, metadata = self._panel._repr_mimebundle_() or ({}, {})
        return Bundle(data, metadata)

    def step(self) -> None:
        """Hear what pages have asked, and tell what is new."""
        with self._lock:
            while self._inbox:
                self._hear(self._inbox.popleft())
            while self._outbox:
                self._tell(*self._outbox.popleft())
            if self.answered:
                self._tell_news()

    def end(self, report: Bundle) -> None:
        """The run is over: tell the last, and leave what a page shows that has no kernel, and what takes the panel's place."""
        with self._lock:
            # whoever has not answered yet is told the last all the same
            self._holds_back = False
            self._unanswered.clear()
            self.step()
            self._ended, self._report = True, report
            if self._was_loaded_anew:
                self._tell_report(report)
            self._lane.leave(self._comm)
            self._panel.snapshot = self._feed.frozen(self.facts)

    def close(self) -> None:
        """Take the panel away from all pages."""
        self._lane.leave(self._comm)
        self._panel.close()

    # ------------------------------------------------------------------------------------------------------- telling

    def _tell_news(self) -> None:
        if self._unanswered and self._clock() > self._unanswered[0][1]:
            self._holds_back = True
        if self._holds_back:
            return
        if self._needs_all:
            self._tell_all()
            return
        # what is taken from the feed and not sent is lost, if an interrupt comes between the two
        self._needs_all = True
        message = self._feed.news()
        if message is not None:
            self._send(message, _PATIENCE)
        self._needs_all = False

    def _tell_all(self) -> None:
        self._needs_all = True
        self._unanswered.clear()
        for message in self._feed.backlog(self.facts):
            self._send(message, _PATIENCE_WITH_ALL)
        self._needs_all = self._holds_back = False

    def _tell(self, message: Message, buffers: list[bytes]) -> None:
        self._send(self._feed.numbered(message), _PATIENCE_WITH_ALL, buffers)

    def _tell_report(self, report: Bundle) -> None:
        """A page that was loaded anew does not know its output by the name by which others take the report."""
        data, metadata = dict(report.data), dict(report.metadata)
        self._tell({"report": {"of": self._comm, "data": data, "metadata": metadata}}, [])

    def _send(self, message: Message, patience: float, buffers: list[bytes] | None = None) -> None:
        self._unanswered.append((message["seq"], self._clock() + patience))
        self._panel.send(message, buffers)

    # ------------------------------------------------------------------------------------------------------- hearing

    def _hear_after_all(self, _panel: Any, content: Message, _buffers: Any) -> None:
        """What the kernel brings in its own time: after the cell, or when no cell runs."""
        self._inbox.append(content)
        if self._ended:
            self.step()

    def _hear(self, content: Message) -> None:
        match content.get("do"):
            case "hello":
                # a second view may be in a page that knows the run already
                if not content.get("seq") or self._holds_back:
                    self._was_loaded_anew |= self.answered
                    self._tell_all()
                self.answered = True
                if self._report is not None:
                    self._tell_report(self._report)
            case "ack":
                self._take_answer(content.get("seq"))
            case "stop":
                self._run.ask("interrupt" if self._was_asked else "finish")
                self._was_asked = True
            case "kill":
                self._run.ask("kill")
            case "stacks":
                self._beside(self._look_for_stacks)
            case "log":
                self._beside(lambda: self._fetch_log(content.get("rank")))

    def _take_answer(self, seq: Any) -> None:
        while isinstance(seq, int) and self._unanswered and self._unanswered[0][0] <= seq:
            self._unanswered.popleft()
        if self._holds_back and not self._unanswered:
            self._holds_back = False
            self._needs_all = self._feed.is_far_behind()

    def _beside(self, work: Callable[[], None]) -> None:
        """Do what takes its time in a thread of its own; what it has to say, the next step tells."""

        def do() -> None:
            work()
            if self._ended:
                self.step()

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(do,), name="accelerate_nb answer", daemon=True).start()

    def _look_for_stacks(self) -> None:
        if self._looks_for_stacks:
            return
        self._looks_for_stacks = True
        try:
            text = self._run.stacks() or "No rank runs any more."
        finally:
            self._looks_for_stacks = False
        self._outbox.append(({"stacks": {"text": text}}, []))

    def _fetch_log(self, rank: Any) -> None:
        if not isinstance(rank, int):
            return
        path = self._run.log_file(rank)
        self._outbox.append(({"log": {"rank": rank, "name": path.name}}, [end_of(path, _MOST_OF_A_LOG)]))


def end_of(path: Path, most: int) -> bytes:
    """A file's last bytes, with a line that says so where they are not all."""
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
