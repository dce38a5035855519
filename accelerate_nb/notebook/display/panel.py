"""The live panel of one run: a widget, with its messages to and from the pages that show it, and their requests."""

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import anywidget
import traitlets

from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.launching.run import Run
from accelerate_nb.notebook.display.busy_kernel_comm import BusyKernelComm
from accelerate_nb.notebook.display.message_feed import Message, MessageFeed
from accelerate_nb.notebook.display.output_area import MimeBundle, cell_id
from accelerate_nb.notebook.page import bundle as joining
from accelerate_nb.reports.report import report_id
from accelerate_nb.reports.summary import RunFacts

# A message to pages, with the bytes that it carries.
Reply: TypeAlias = tuple[Message, list[bytes]]

_MOST_OF_A_FILE = 64 * 1024 * 1024


def reply(run: Run, content: Message) -> Reply | None:
    """Carry out the request of a page; the message that replies to it, if any."""
    match content:
        case {"do": "stacks"}:
            return {"stacks": {"text": run.stacks() or "No rank runs any more."}}, []
        case {"do": "knob", "name": name, "value": value}:
            try:
                run.set_knob(str(name), value)
            except AccelerateNbError as error:
                return {"knob_error": {"name": name, "text": str(error)}}, []
        case {"do": "profile"}:
            try:
                run.profile(ranks=content.get("ranks"))
            except AccelerateNbError as error:
                return {"profile_error": str(error)}, []
        case {"do": "trace", "rank": int(rank)}:
            return _trace(run, rank)
        case {"do": "log", "rank": int(rank)}:
            path = run.log_file(rank)
            return {"file": {"name": path.name}}, [end_of(path, _MOST_OF_A_FILE)]
    return None


def _trace(run: Run, rank: int) -> Reply | None:
    if (profile := run.view.rank(rank).profile) is None:
        return None
    path = run.folder / Path(profile.trace).name
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


# The time for a page to acknowledge a message before it gets no more; the whole backlog takes it longer.
_TIMEOUT = 3.0
_BACKLOG_TIMEOUT = 20.0


class PanelWidget(anywidget.AnyWidget):
    """The widget: the modules of `page` draw it from the messages that it is sent."""

    # Until a page has the end of the run, `place` names the panel, its cell and its report: a page that is loaded anew puts the
    # panel back, which brings the report. From then on it names the report alone, in whose place pages draw the panel.
    _esm = joining.module()
    _css = joining.style()
    place: Any = traitlets.Dict().tag(sync=True)


class LivePanel:
    """A run's panel, and its conversation with the pages that show it; `step` is called about ten times a second, from any thread."""

    def __init__(
        self,
        run: Run,
        host: str,
        kernel_comm: BusyKernelComm,
        *,
        background: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._kernel_comm, self._clock = run, kernel_comm, clock
        self._inbox: deque[Message] = deque()
        self._outbox: deque[Reply] = deque()
        self._comm = uuid4().hex
        # a background run's cell is over soon, and then the kernel brings the clicks by itself
        can_act = kernel_comm.join(self._comm, self._take) or background
        self.facts = RunFacts.of(run, host, background=background, can_act=can_act)
        self._report_place = {"report": report_id(self.facts)}
        # a run that a cell waits for is ended by `end`, however soon it was over
        self._ended = background and run.done
        self._feed = MessageFeed(run.view)
        self._takes_stacks = False
        self._lock = threading.RLock()
        self._unanswered: deque[tuple[int, float]] = deque()
        self._holds_back = self._stop_requested = False
        self._needs_all = False
        self._report: MimeBundle | None = None
        self._was_loaded_anew = False
        self.replied = False
        # a page reads it as soon as it has the widget, and the cell only when it is loaded anew: its output is about to come
        place = self._report_place if self._ended else {"panel": self._comm, **self._report_place}
        self._panel = PanelWidget(model_id=self._comm, place=place)
        if not self._ended:
            self._panel.place = {**place, "cell": cell_id()}
        self._panel.on_msg(lambda _widget, content, _buffers: self._take(content))

    def bundle(self) -> MimeBundle:
        """The MIME bundle that makes a page draw the panel."""
        data, metadata = self._panel._repr_mimebundle_() or ({}, {})
        return MimeBundle(data, metadata)

    def step(self) -> None:
        """Handle the requests of pages, and send the changes."""
        with self._lock:
            # an interrupt of the cell may come at any line: what it ends halfway is done once more
            while self._inbox:
                self._receive(self._inbox[0])
                self._inbox.popleft()
            while self._outbox:
                message, buffers = self._outbox[0]
                self._send(self._feed.numbered(message), _BACKLOG_TIMEOUT, buffers)
                self._outbox.popleft()
            if self.replied:
                self._send_news()

    def end(self, report: MimeBundle) -> None:
        """End the panel: send the last changes, and the report that replaces it."""
        with self._lock:
            # a page that has not replied yet gets the last changes all the same
            self._holds_back = False
            self._unanswered.clear()
            self.step()
            self._ended, self._report = True, report
            if self._was_loaded_anew:
                self._send_report(report)
            self._kernel_comm.leave(self._comm)

    @property
    def is_delivered(self) -> bool:
        """Whether a page has the end of the run; where none was open, the next one gets it."""
        return bool(self._panel.place == self._report_place)

    def close(self) -> None:
        """Take the panel away from all pages."""
        self._kernel_comm.leave(self._comm)
        self._panel.close()

    # ------------------------------------------------------------------------------------------------------- telling

    def _send_news(self) -> None:
        if self._unanswered and self._clock() > self._unanswered[0][1]:
            self._holds_back = True
        if self._holds_back:
            return
        if self._needs_all:
            self._send_all()
            return
        # what is taken from the feed and not sent is lost, if an interrupt comes between the two
        self._needs_all = True
        message = self._feed.news()
        if message is not None:
            self._send(message, _TIMEOUT)
        self._needs_all = False

    def _send_all(self) -> None:
        self._needs_all = True
        self._unanswered.clear()
        for message in self._feed.backlog(self.facts):
            self._send(message, _BACKLOG_TIMEOUT)
        self._needs_all = self._holds_back = False

    def _send_report(self, report: MimeBundle) -> None:
        """Send the report to pages: a reloaded page does not know its output under the display id of the report."""
        data, metadata = dict(report.data), dict(report.metadata)
        message = self._feed.numbered({"report": {"of": self._comm, "data": data, "metadata": metadata}})
        self._send(message, _BACKLOG_TIMEOUT)

    def _send(self, message: Message, timeout: float, buffers: list[bytes] | None = None) -> None:
        self._unanswered.append((message["seq"], self._clock() + timeout))
        self._panel.send(message, buffers)

    # ------------------------------------------------------------------------------------------------------- hearing

    def _take(self, content: Message) -> None:
        """A page's message, while a cell runs or from the kernel's own queue."""
        self._inbox.append(content)
        if self._ended:
            self.step()

    def _receive(self, content: Message) -> None:
        match content.get("do"):
            case "hello":
                was_drawn, self.replied = self.replied, True
                # a second view may be in a page that knows the run already
                if not content.get("seq") or self._holds_back:
                    self._was_loaded_anew |= was_drawn
                    self._send_all()
                if self._report is not None:
                    self._send_report(self._report)
            case "ack":
                self._take_acknowledgement(content.get("seq"))
            case "stop":
                self._run.request_stop("interrupt" if self._stop_requested else "finish")
                self._stop_requested = True
            case "kill":
                self._run.request_stop("kill")
            case "stacks" | "knob" | "profile" | "trace" | "log":
                self._beside(content)

    def _take_acknowledgement(self, seq: Any) -> None:
        while isinstance(seq, int) and self._unanswered and self._unanswered[0][0] <= seq:
            self._unanswered.popleft()
        if self._ended and seq >= self._feed.seq:
            self._panel.place = self._report_place
        if self._holds_back and not self._unanswered:
            self._holds_back = False
            self._needs_all = self._feed.is_far_behind()

    def _beside(self, content: Message) -> None:
        """Reply to a request in a thread of its own; the next step sends the reply."""

        def do() -> None:
            takes_stacks = content["do"] == "stacks"
            if takes_stacks and self._takes_stacks:
                # those that are being taken are the reply
                return
            if takes_stacks:
                self._takes_stacks = True
            try:
                message = reply(self._run, content)
            finally:
                if takes_stacks:
                    self._takes_stacks = False
            if message is not None:
                self._outbox.append(message)
            if self._ended:
                self.step()

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(do,), name="accelerate_nb reply", daemon=True).start()
