"""Widget messages during a running cell: they are taken where the kernel reads its messages."""

import contextvars
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeAlias

from accelerate_nb.sources.cells import ipython_shell

Content: TypeAlias = dict[str, Any]

_log = logging.getLogger(__name__)
# Requests of a reloaded page: the kernel's info, its widgets, and their states.
_OF_A_RELOAD = frozenset({"kernel_info_request", "comm_info_request"})
_WIDGETS = "jupyter.widget.control"
_TIMEOUT = 2.0


class BusyKernelComm:
    """Takes messages of some comms out of the kernel's queue, at once, while a cell runs; a handler should only keep the message."""

    # Kernels take one message after the other, and the cell that runs is one: a click on a widget comes after it. This reads before
    # the queue: on ipykernel 7 in the thread that reads the socket, before that in the main thread's loop, which the cell keeps,
    # so that the waiting code has to call `pump`. A message that is not for it goes on unchanged.
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._handlers: dict[str, Callable[[Content], None]] = {}
        self._kernel: Any = None
        self._stream: Any = None
        self._former: Callable[[Any], Any]
        self._is_installed = False
        self._controls: set[str] = set()
        self._holds: list[tuple[contextvars.Context, Any]] = []

    # ------------------------------------------------------------------------------------------------- coming, going

    def join(self, comm_id: str, handler: Callable[[Content], None]) -> bool:
        """Give a comm's messages to a handler from now on; whether that works in this kernel while a cell runs."""
        with self._lock:
            self._handlers[comm_id] = handler
            self._is_installed = self._is_installed or self._install()
            return self._is_installed

    def leave(self, comm_id: str) -> None:
        """Handle a comm's messages no longer; with the last one, the kernel is as it was."""
        with self._lock:
            self._handlers.pop(comm_id, None)
            if not self._handlers and self._is_installed:
                self._remove()

    @contextmanager
    def held(self) -> Iterator[None]:
        """While a cell waits in this block, requests of a reloaded page get a reply, too."""
        kernel: Any = getattr(ipython_shell(), "kernel", None)
        cell = kernel.get_parent("shell") if hasattr(kernel, "get_parent") else None
        hold = (contextvars.copy_context(), cell)
        self._holds.append(hold)
        try:
            yield
        finally:
            # no status of the cell is sent after its end
            with self._lock:
                self._holds.remove(hold)

    def pump(self) -> None:
        """Read what has come, where only the waiting thread can do that; call it some times a second."""
        if not self._is_installed or self._in_own_thread() or threading.current_thread() is not threading.main_thread():
            return
        self._stream.flush()

    def _install(self) -> bool:
        kernel: Any = getattr(ipython_shell(), "kernel", None)
        stream = getattr(kernel, "shell_stream", None)
        # pyzmq has no getter for a stream's reader; only a known one can be put back
        former = getattr(stream, "_recv_callback", None)
        if former is None or not hasattr(kernel, "session"):
            return False
        notice_every_request()
        self._kernel, self._stream = kernel, stream
        if former != self._take:  # its removal may not have been its turn yet
            self._former = former
        installed = threading.Event()

        def install() -> None:
            self._stream.on_recv(self._take, copy=False)
            installed.set()

        self._change(install)
        return installed.wait(_TIMEOUT) if self._in_own_thread() else True

    def _remove(self) -> None:
        # another filter may have come since: then this one stays, and passes everything on
        if getattr(self._stream, "_recv_callback", None) == self._take:
            self._is_installed = False
            self._controls.clear()
            self._change(lambda: None if self._is_installed else self._stream.on_recv(self._former, copy=False))

    def _change(self, what: Callable[[], Any]) -> None:
        """Do something to the stream, where its thread does nothing with it at the same time."""
        if not self._in_own_thread() and threading.current_thread() is threading.main_thread():
            what()
        else:
            self._stream.io_loop.add_callback(what)

    def _in_own_thread(self) -> bool:
        """Whether the kernel reads its messages in a thread of their own."""
        return getattr(self._kernel, "shell_channel_thread", None) is not None

    # ---------------------------------------------------------------------------------------------------- each message

    def _take(self, frames: Any) -> Any:
        try:
            if self._took(self._kernel, frames):
                return None
        except Exception:  # noqa: BLE001 - the kernel's own way is open, whatever is wrong with this one
            _log.debug("a message could not be taken early", exc_info=True)
        return self._former(frames)

    def _took(self, kernel: Any, frames: Any) -> bool:
        """Whether a message was for one of the handlers, which has handled it."""
        identities, parts = kernel.session.feed_identities(frames, copy=False)
        # without its content a message is only inspected: its signature is checked, and it may be read again
        message = kernel.session.deserialize(parts, content=False, copy=False)
        message_type = message["header"]["msg_type"]
        if not message_type.startswith("comm_") and message_type not in _OF_A_RELOAD:
            return False
        message["content"] = content = kernel.session.unpack(message["content"])
        if message_type == "comm_msg" and (handler := self._handlers.get(content.get("comm_id"))) is not None:
            data = content.get("data") or {}
            if data.get("method") == "custom":
                handler(data.get("content") or {})
                self._send_cell_is_busy(kernel)
                return True
        if not self._is_of_a_reload(message_type, content):
            return False
        with self._lock:
            # while a cell waits, a reloaded page gets its reply here
            if not self._holds:
                return False
            context, _ = self._holds[-1]
            context.copy().run(_handle, kernel, identities, message)
            self._send_cell_is_busy(kernel)
            return True

    def _send_cell_is_busy(self, kernel: Any) -> None:
        """Report the kernel as busy again: a page takes it for idle after any request beside the cell."""
        with self._lock:
            if self._holds and (cell := self._holds[-1][1]):
                _send_status(kernel, "busy", cell)

    def _is_of_a_reload(self, message_type: str, content: Content) -> bool:
        comm = content.get("comm_id", "")
        if message_type == "comm_open" and content.get("target_name") == _WIDGETS:
            self._controls.add(comm)
        # a page that got no reply on that comm in four seconds requests each widget's state on the widget's own
        is_state_request = message_type == "comm_msg" and (content.get("data") or {}).get("method") == "request_state"
        return message_type in _OF_A_RELOAD or comm in self._controls or is_state_request


def _handle(kernel: Any, identities: Any, message: Any) -> None:
    """Do what the kernel does with a message when its turn comes."""
    message_type = message["header"]["msg_type"]
    comm = kernel.comm_manager.comms.get(message["content"].get("comm_id")) if message_type == "comm_msg" else None
    _send_status(kernel, "busy", message)
    if comm is not None:
        # not by `handle_msg`, which signals the start and end of a cell to IPython
        with _as_parent(kernel, message):
            comm._msg_callback(message)
    else:
        handled = kernel.shell_handlers[message_type](kernel.shell_stream, identities, message)
        if inspect.iscoroutine(handled):
            # one that waits for nothing
            with suppress(StopIteration):
                handled.send(None)
            handled.close()
    _send_status(kernel, "idle", message)


@contextmanager
def _as_parent(kernel: Any, message: Any) -> Iterator[None]:
    """In the block, what the kernel sends is a reply to this message: a page takes a widget's state for nothing else."""
    parent = getattr(kernel, "_shell_parent", None)
    if isinstance(parent, ContextVar):
        # ipykernel 7; the context is a copy, which nobody else sees
        parent.set(message)
        yield
        return
    parents = kernel._parents
    former = parents.get("shell", {})
    parents["shell"] = message
    try:
        yield
    finally:
        parents["shell"] = former


def _send_status(kernel: Any, state: str, parent: Any) -> None:
    topic = f"kernel.{kernel.ident}.status".encode()
    kernel.session.send(kernel.iopub_socket, "status", {"execution_state": state}, parent=parent, ident=topic)


def notice_every_request() -> None:
    """Have a kernel of ipykernel 7.0 to 7.3 write its replies through the stream that reads its requests, from now on."""
    # These versions write to that stream's socket. A request that arrives at that moment is then never noticed, and the
    # kernel hangs: https://github.com/ipython/ipykernel/pull/1529. A panel that acknowledges every update makes that
    # likely, as does a client that sends a cell when the former one's status is idle, before it has the reply.
    kernel: Any = getattr(ipython_shell(), "kernel", None)
    manager = getattr(getattr(kernel, "shell_channel_thread", None), "_manager", None)
    if hasattr(manager, "_shell_socket") and (stream := getattr(kernel, "shell_stream", None)) is not None:
        manager._shell_socket = stream  # type: ignore[union-attr]


_kernel_comm: ContextVar[BusyKernelComm] = ContextVar("accelerate_nb_kernel_comm", default=BusyKernelComm())  # noqa: B039 - one for all threads


def kernel_comm() -> BusyKernelComm:
    """The `BusyKernelComm` of this process's kernel."""
    return _kernel_comm.get()
