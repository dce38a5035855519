"""The kernel's messages to a worker while its function runs, received in a thread of their own, and the replies to them."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, ClassVar, TypeAlias

from msgspec.structs import astuple

from accelerate_nb.failures.stack_dumps import as_faulthandler
from accelerate_nb.rank.event_sink import emit
from accelerate_nb.rank.step_hold import current_step_hold
from accelerate_nb.rank.step_profiler import ProfileRequest, current_step_profiler
from accelerate_nb.transport import messages
from accelerate_nb.transport.channel import Channel, ReceivedMessage, frame

# A handler gets the message, and its descriptors, which it closes.
Handler: TypeAlias = Callable[[Any, Sequence[int]], None]


class ControlChannel:
    """A worker's end of its socket: handlers, which are quick and raise nothing, get messages in its thread."""

    # the process's own; `None` where there is no kernel, and in processes that this one forks, since the thread stays here
    current: ClassVar[ControlChannel | None] = None

    def __init__(self, sock: socket.socket) -> None:
        self._channel = Channel(sock)
        self._lock = threading.Lock()
        self._handlers: dict[type[messages.Message], Handler] = {}
        self._waiting: list[ReceivedMessage] = []
        # set when the kernel reports that all ranks have returned, or has gone
        self.leave = threading.Event()
        threading.Thread(target=self._receive, name="accelerate_nb inbox", daemon=True).start()

    def on(self, message_class: type[messages.Message], handler: Handler) -> None:
        """Hand messages of this class to `handler` from now on; those that came before go to it at once."""
        with self._lock:
            self._handlers[message_class] = handler
            due = [waiting for waiting in self._waiting if type(waiting.message) is message_class]
            self._waiting = [waiting for waiting in self._waiting if type(waiting.message) is not message_class]
        for message, descriptors in due:
            handler(message, descriptors)

    def _receive(self) -> None:
        # the notebook's process may go, and then this one is about to be ended
        with suppress(OSError):
            while (received := self._channel.receive()) is not None:
                if isinstance(received.message, messages.LeaveGroup):
                    self.leave.set()
                    continue
                with self._lock:
                    handler = self._handlers.get(type(received.message))
                    if handler is None:
                        self._waiting.append(received)
                if handler is not None:
                    handler(*received)
        self.leave.set()


# A reply has no more of them.
_MOST_COLLECTIVES = 20
_PACKAGE = str(Path(__file__).parents[1])
# Files of torch whose calls wait for other ranks; those that wait for one, by the argument that names it.
_OF_TORCH = ("torch/distributed/distributed_c10d.py", "torch/distributed/elastic/utils/store.py")
_PEERS = {
    **dict.fromkeys(("recv", "irecv", "recv_object_list"), "src"),
    **dict.fromkeys(("send", "isend", "send_object_list"), "dst"),
}


def open_inbox(sock: socket.socket, stacks: int) -> ControlChannel:
    """Make this socket's channel the process's inbox, and reply to the kernel's messages from now on; to some in the file of stacks."""
    ControlChannel.current = channel = ControlChannel(sock)
    os.register_at_fork(after_in_child=lambda: setattr(ControlChannel, "current", None))
    # a stop request inherited by a fork
    current_step_hold().reset()
    channel.on(messages.HoldAtStep, lambda message, _: emit(current_step_hold().hold(message.rank, message.number)))
    channel.on(messages.StopAt, lambda message, _: current_step_hold().stop_at(message.point))
    channel.on(messages.ChangeKnobAfter, lambda message, _: current_step_hold().change_knob_after(*astuple(message)))
    channel.on(messages.QueryPosition, lambda *_: _write_position(stacks))
    channel.on(
        messages.ProfileSteps, lambda message, _: current_step_profiler().request(ProfileRequest(*astuple(message)))
    )
    return channel


def _write_position(file: int) -> None:
    call = sys._current_frames().get(threading.main_thread().ident or 0)
    stack, entries = as_faulthandler(call), recorded()
    awaited = awaited_ranks(call, entries)
    known = (*entries[-_MOST_COLLECTIVES:], *([{"awaited": awaited}] if awaited else ()))
    # its end is faulthandler's as well: in one piece
    with suppress(OSError):
        os.write(file, frame(messages.PositionReply(stack, known)))


def recorded() -> list[dict[str, Any]]:
    """The collectives that are under way by torch's flight recorder, oldest first; none where torch has no such thing."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            entries += json.loads(dump(includeCollectives=True, onlyActive=True) or b"{}").get("entries", [])
    return [
        {
            "group": entry["process_group"][0],
            "number": entry["collective_seq_id"],
            "name": entry["profiling_name"],
            "sizes": entry["input_sizes"],
        }
        for entry in entries
        if not entry["retired"]
    ]


def awaited_ranks(innermost: FrameType | None, entries: Sequence[dict[str, Any]]) -> list[int]:
    """The ranks that a thread's innermost call waits for: by torch's group or peer, this package's, or an entry's."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return []
    calls = [call for call, _ in walk_stack(innermost)] if innermost is not None else []
    # outermost first: a collective of objects makes others
    for call in reversed(calls):
        if call.f_code.co_filename.endswith(_OF_TORCH) and (ranks := _ranks_in(call, c10d)):
            return ranks
    for call in calls:
        if call.f_code.co_filename.startswith(_PACKAGE):
            world = getattr(call.f_locals.get("self"), "world", call.f_locals.get("world"))
            if ranks := _members(c10d, getattr(world, "group", None)):
                return ranks
    name = entries[0]["group"] if entries else None
    return next((_members(c10d, group) for group, known in list(c10d._world.pg_names.items()) if known == name), [])


def _ranks_in(call: FrameType, c10d: Any) -> list[int]:
    """The ranks that a call of torch waits for; none where it names none."""
    known, name = call.f_locals, call.f_code.co_name
    is_of_all = name in {"init_process_group", "new_group"} or call.f_code.co_filename.endswith(_OF_TORCH[1])
    if is_of_all and not known.get("use_local_synchronization"):
        return list(range(int(os.environ.get("WORLD_SIZE", "1"))))
    if name in _PEERS:
        return [known[_PEERS[name]]] if isinstance(known.get(_PEERS[name]), int) else []
    return _members(c10d, known["group"] or c10d.GroupMember.WORLD) if "group" in known else []


def _members(c10d: Any, group: Any) -> list[int]:
    """The ranks of a process group; none where it is none, or gone."""
    return sorted(c10d._world.pg_group_ranks.get(group, ())) if group is not None else []
