"""A way for a page's clicks past the cell that runs: they are taken where the kernel reads its messages."""

from __future__ import annotations

import contextvars
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

Content: TypeAlias = dict[str, Any]

_log = logging.getLogger(__name__)
# What a page asks when it has been reloaded: who the kernel is, which widgets there are, and how they are.
_OF_A_RELOAD = frozenset({"kernel_info_request", "comm_info_request"})
_WIDGETS = "jupyter.widget.control"
_PATIENCE = 2.0


class Lane:
    """
    Takes messages of some comms out of the kernel's queue, at once, while a cell runs.

    Kernels take one message after the other, and the cell that runs is one: a click on a widget comes after it. The lane
    stands before the queue: on ipykernel 7 in the thread that reads the socket, before that in the main thread's loop,
    which the cell keeps, so that whoever waits has to call `pump`. A message that is not for it goes on unchanged.

    What a handler does is done in another thread, or in the middle of a cell: it should do no more than keep the message.

    >>> lane.join(comm_id, received.append)
    True
    >>> with lane.held(): wait()
    >>> lane.leave(comm_id)
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._handlers: dict[str, Callable[[Content], None]] = {}
        self._kernel: Any = None
        self._stream: Any = None
        self._former: Callable[[Any], Any]
        self._is_laid = False
        self._controls: set[str] = set()
        self._holds: list[tuple[contextvars.Context, Any]] = []

    # ------------------------------------------------------------------------------------------------- coming, going

    def join(self, comm_id: str, handler: Callable[[Content], None]) -> bool:
        """Give a comm's messages to a handler from now on; whether that works in this kernel while a cell runs."""
        with self._lock:
            self._handlers[comm_id] = handler
            self._is_laid = self._is_laid or self._install()
            return self._is_laid

    def leave(self, comm_id: str) -> None:
        """Handle a comm's messages no longer; with the last one, the kernel is as it was."""
        with self._lock:
            self._handlers.pop(comm_id, None)
            if not self._handlers and self._is_laid:
                self._remove()

    @contextmanager
    def held(self) -> Iterator[None]:
        """While a cell waits in this block, what a reloaded page asks is answered, too."""
        hold = (contextvars.copy_context(), self._parent())
        self._holds.append(hold)
        try:
            yield
        finally:
            # nothing is said of the cell after its end
            with self._lock:
                self._holds.remove(hold)

    def pump(self) -> None:
        """Read what has come, where only the waiting thread can do that; call it some times a second."""
        if not self._is_laid or self._in_own_thread() or threading.current_thread() is not threading.main_thread():
            return
        self._stream.flush()

    def _install(self) -> bool:
        kernel = _kernel()
        stream = getattr(kernel, "shell_stream", None)
        # pyzmq tells nobody what reads a stream; only what is known can be put back
        former = getattr(stream, "_recv_callback", None)
        if former is None or not hasattr(kernel, "session"):
            return False
        self._kernel, self._stream = kernel, stream
        if former != self._take:  # its removal may not have been its turn yet
            self._former = former
        laid = threading.Event()

        def lay() -> None:
            self._stream.on_recv(self._take, copy=False)
            laid.set()

        self._change(lay)
        return laid.wait(_PATIENCE) if self._in_own_thread() else True

    def _remove(self) -> None:
        # another filter may have come since: then this one stays, and passes everything on
        if getattr(self._stream, "_recv_callback", None) == self._take:
            self._is_laid = False
            self._controls.clear()
            self._change(lambda: None if self._is_laid else self._stream.on_recv(self._former, copy=False))

    def _change(self, what: Callable[[], Any]) -> None:
        """Do something to the stream, where its thread does nothing with it at the same time."""
        if not self._in_own_thread() and threading.current_thread() is threading.main_thread():
            what()
        else:
            self._stream.io_loop.add_callback(what)

    def _in_own_thread(self) -> bool:
        """Whether the kernel reads its messages in a thread of their own."""
        return getattr(self._kernel, "shell_channel_thread", None) is not None

    def _parent(self) -> Any:
        """The message that the kernel works on: the cell that waits."""
        kernel = _kernel()
        return kernel.get_parent("shell") if hasattr(kernel, "get_parent") else None

    # ---------------------------------------------------------------------------------------------------- each message

    def _take(self, frames: Any) -> Any:
        try:
            if self._took(self._kernel, frames):
                return None
        except Exception:  # noqa: BLE001 - the kernel's own way is open, whatever is wrong with this one
            _log.debug("a message could not be taken early", exc_info=True)
        return self._former(frames)

    def _took(self, kernel: Any, frames: Any) -> bool:
        """Whether a message was one for the lane, which has handled it then."""
        identities, parts = kernel.session.feed_identities(frames, copy=False)
        # without its content a message is only looked at: its signature is checked, and it may be read again
        message = kernel.session.deserialize(parts, content=False, copy=False)
        kind = message["header"]["msg_type"]
        if not kind.startswith("comm_") and kind not in _OF_A_RELOAD:
            return False
        message["content"] = content = kernel.session.unpack(message["content"])
        if kind == "comm_msg" and (handler := self._handlers.get(content.get("comm_id"))) is not None:
            data = content.get("data") or {}
            if data.get("method") == "custom":
                handler(data.get("content") or {})
                self._say_that_the_cell_goes_on(kernel)
                return True
        if self._is_of_a_reload(kind, content):
            return self._answered(kernel, identities, message)
        return False

    def _say_that_the_cell_goes_on(self, kernel: Any) -> None:
        """A page thinks the kernel idle after whatever it has asked beside the cell: a debugger's, or for a subshell."""
        with self._lock:
            if self._holds and (cell := self._holds[-1][1]):
                _say(kernel, "busy", cell)

    def _answered(self, kernel: Any, identities: Any, message: Any) -> bool:
        """Whether a cell waits, during which a reloaded page has been answered."""
        with self._lock:
            if self._holds:
                context, _ = self._holds[-1]
                context.copy().run(_answer, kernel, identities, message)
                self._say_that_the_cell_goes_on(kernel)
                return True
        return False

    def _is_of_a_reload(self, kind: str, content: Content) -> bool:
        comm = content.get("comm_id", "")
        if kind == "comm_open" and content.get("target_name") == _WIDGETS:
            self._controls.add(comm)
        return kind in _OF_A_RELOAD or comm in self._controls


def _answer(kernel: Any, identities: Any, message: Any) -> None:
    """Do what the kernel does with a message when its turn comes."""
    kind = message["header"]["msg_type"]
    comm = kernel.comm_manager.comms.get(message["content"].get("comm_id")) if kind == "comm_msg" else None
    _say(kernel, "busy", message)
    if comm is not None:
        # not by `handle_msg`, which tells IPython that a cell begins and ends
        comm._msg_callback(message)
    else:
        answer = kernel.shell_handlers[kind](kernel.shell_stream, identities, message)
        if inspect.iscoroutine(answer):
            _run(answer)
    _say(kernel, "idle", message)


def _run(coroutine: Any) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()


def _say(kernel: Any, state: str, parent: Any) -> None:
    topic = f"kernel.{kernel.ident}.status".encode()
    kernel.session.send(kernel.iopub_socket, "status", {"execution_state": state}, parent=parent, ident=topic)


def _kernel() -> Any:
    """The kernel of this process, where it is one."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython.get_ipython(), "kernel", None) if ipython is not None else None


_lane: ContextVar[Lane] = ContextVar("accelerate_nb_lane", default=Lane())  # noqa: B039 - one for all threads


def lane() -> Lane:
    """The lane of this process's kernel."""
    return _lane.get()
