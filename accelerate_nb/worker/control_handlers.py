"""A worker's replies to the kernel while its function runs, from the inbox's thread: how far it is, and where."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any

from accelerate_nb.rank.event_sink import emit
from accelerate_nb.rank.knobs import current_knobs
from accelerate_nb.rank.step_profiler import ProfileRequest, current_step_profiler
from accelerate_nb.rank.stop_request import current_stop_request
from accelerate_nb.transport.protocol.framing import frame
from accelerate_nb.transport.protocol.knob_messages import ChangeKnobAfter, HoldForKnob
from accelerate_nb.transport.protocol.message import Message
from accelerate_nb.transport.protocol.messages import (
    CollectivesReply,
    HoldAtBoundary,
    HoldReply,
    QueryCollectives,
    StopAt,
)
from accelerate_nb.transport.protocol.profile_messages import ProfileSteps
from accelerate_nb.worker.control_channel import ControlChannel

# More of them than are sent would fill the pipe.
_MOST_COLLECTIVES = 20


def install(channel: ControlChannel) -> None:
    """Reply to the kernel's messages from now on; a stop request inherited by a fork is forgotten."""
    current_stop_request().reset()
    channel.on(HoldAtBoundary, _hold)
    channel.on(StopAt, _stop_at)
    channel.on(QueryCollectives, _collectives)
    channel.on(HoldForKnob, lambda message, _: emit(current_knobs().hold(message.rank, message.number)))
    channel.on(ChangeKnobAfter, lambda message, _: current_knobs().change(*astuple(message)))
    channel.on(ProfileSteps, lambda message, _: current_step_profiler().request(ProfileRequest(*astuple(message))))


def _hold(_: HoldAtBoundary, descriptors: Sequence[int]) -> None:
    _reply(descriptors, HoldReply(current_stop_request().hold()))


def _stop_at(message: StopAt, _: Sequence[int]) -> None:
    current_stop_request().until(message.point)


def _collectives(_: QueryCollectives, descriptors: Sequence[int]) -> None:
    _reply(descriptors, CollectivesReply(tuple(recorded()[-_MOST_COLLECTIVES:])))


def _reply(descriptors: Sequence[int], reply: Message) -> None:
    (pipe,) = descriptors
    # nobody may wait for it any more
    with suppress(BrokenPipeError), open(pipe, "wb") as file:
        file.write(frame(reply))


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
