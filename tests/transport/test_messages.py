"""A message arrives as it was sent, and what is none is refused with its reason."""

import json
import math
import pickle
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from accelerate_nb.errors import ProtocolError
from accelerate_nb.events.event_types import Display, HostSample, LogLine, Metric, StateChange
from accelerate_nb.rank.step_hold import StopPoint
from accelerate_nb.transport import messages, worker_spec
from accelerate_nb.transport.channel import decode, encode


def worker(rank: int = 0, text: str = "") -> worker_spec.LocalWorker:
    """A worker with a text in its environment."""
    address = worker_spec.NetworkAddress("10.0.0.1", 12345)
    info = worker_spec.RankInfo(rank, 4, rank % 2, 2, address, "abc", node_rank=rank // 2, nodes=2)
    environment = worker_spec.ProcessEnvironment({"TEXT": text}, "/tmp", ("", "/lib"), ("x",), "00ff", None)
    descriptors = worker_spec.WorkerDescriptors(3, 4, 5, 6, 7, payload=8, more=(9, 10))
    return worker_spec.LocalWorker(worker_spec.WorkerSpec(info, environment), descriptors)


FACTS = messages.NodeFacts("a", "10.0.0.1", "3.11.7", "2.13.0+cpu", "0.1.0", "cuda", "GPU", 8, 96, 1700000000.5)
EXAMPLES = [
    *(messages.ForkSupervisor(), messages.KillGroup(), messages.QueryPosition(), messages.LeaveGroup()),
    *(messages.CloseSession(), messages.RunTimedOut(), messages.RunStarted(), messages.CloseGroup()),
    *(messages.GroupClosed(), messages.QueryNode(), messages.Heartbeat(), messages.QueryStacks()),
    messages.QueryLiveState(),
    *(messages.SupervisorStarted(77), messages.WorkerStarted(1, 77), messages.WorkerExited(1, -9)),
    *(messages.ForkFailed(1, 11), messages.RankOutcome(1, 4), messages.HoldAtStep(1, 3), messages.NodeReady(1)),
    *(messages.RankTaskReply(1, 3, 7), messages.FilePart(256, False), messages.NodeLeft("its run is over")),
    *(messages.ReleaseRanks((0,)), messages.SignalRanks(2, (0,)), messages.InterruptTask(1, (77,))),
    *(messages.ShowText("waits\n"), messages.StopAt(StopPoint(7, True)), messages.StopAt(StopPoint(7, False, 3))),
    *(messages.RequestStop("finish"), messages.RequestMembership("box"), messages.MembershipGranted("box-2")),
    *(messages.BeginTask(1, None, ()), messages.BeginTask(1, "1", (77, 78))),
    messages.OpenGroup("grüße/0"),
    messages.ForkWorker("a/0", worker(1, 'text "\udcff"\n')),
    messages.ImportModules(("torch", "numpy"), {"HOME": "/root"}, 2.0),
    messages.VariablesRead({"HF_HOME": None, "HOME": "/root"}),
    messages.ImportModules((), {}, 0),
    messages.BeginWorker(worker(3)),
    messages.RankEvent(1, 0, StateChange(1, "running", 2.0)),
    messages.RankOutput(1, 1, b"line \xff\x00\n", (LogLine(1, "stdout", "line", 2.0),)),
    messages.RankReports(
        (messages.RankOutput(1, 1, b"line\n", (LogLine(1, "stdout", "line", 2.0),)), messages.RankExited(1, 2, -9, 1.5))
    ),
    messages.RankOutput(1, 2, b"line\n", (), 3 << 30, "/logs/rank_1.log"),
    messages.RankExited(1, 5, -9, 2.0, "Current thread"),
    messages.NodeLoad(HostSample(50.0, (1, 2), None, None, 2.0, node=1)),
    messages.AgentLost((0, 1), "it ended with code 1", 2.0),
    messages.JoinRun("none", 2, None, 1, "cpu", FACTS),
    messages.RunJoined("run", 1, 1, (0, 2), ("node 0 on a", "node 1 on b"), (1, 1), 4000, 3, 0.1, None, "node 1 on b"),
    messages.NodeMessage(2, None, 1, b"\x00\xff"),
    messages.RunRefused("node_rank=1 is taken"),
    messages.LaunchFailed("LaunchError", "it has no room"),
    messages.StartWorkers((worker(0).spec, worker(1).spec), True),
    messages.ToRank(1, messages.InterruptTask(1, (77,))),
    messages.QueryRankStacks(1, (0, 1)),
    messages.RankStacks(1, {"0": "Current thread", "1": ""}, {"0": ({"group": "0", "sizes": [[2, 2]]},)}),
    FACTS,
    messages.ListenToPeers(0, ("10.0.0.2", "fe80::1")),
    messages.PeerEndpoint("10.0.0.1", 40001, "eth0", "no such port"),
    messages.ConnectToPeers(tuple(worker_spec.NetworkAddress(f"10.0.0.{node}", 40000 + node) for node in (1, 2)), 4.0),
    messages.PeersReached({"1": "nothing came back"}),
    messages.ChangeKnobAfter(3, "lr", 1e-4, 17),
    messages.ChangeKnob("lr", 1e-4),
    messages.ProfileSteps(1, 3, 10, "/runs/1"),
    messages.RequestProfile(10, (0, 2)),
    messages.PositionReply("Current thread:\n", ({"group": "0", "number": 3, "sizes": [[2, 2]]},)),
    messages.StacksReply("rank 0:\n  grüße"),
    messages.LiveState(True, (HostSample(50.0, (1, 2), None, None, 2.0), LogLine(0, "stderr", "10 %", 1.0, True))),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=type)
def test_a_message_arrives_as_it_was_sent(message: messages.Message) -> None:
    assert decode(encode(message)) == message
    for name in message.__struct_fields__:
        # nor can it change
        with pytest.raises(AttributeError):
            setattr(message, name, None)


def test_every_message_has_an_example() -> None:
    assert {type(message) for message in EXAMPLES} == set(messages.Message.__subclasses__())


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([], "Expected `object`"),
        ({}, "missing required field `type`"),
        ({"type": "DoIt"}, "DoIt"),
        ({"type": "SignalRanks", "number": 2}, "missing required field `ranks`"),
        ({"type": "SignalRanks", "number": True, "ranks": []}, "Expected `int`, got `bool`"),
        ({"type": "SignalRanks", "number": 2, "ranks": [0, "1"]}, "Expected `int`, got `str`"),
        ({"type": "BeginWorker", "worker": {"spec": {}}}, "worker"),
        ({"type": "BeginTask", "number": 1, "renewal": 1, "others": []}, "Expected `str | null`, got `int`"),
        ({"type": "RankEvent", "rank": 0, "number": 0, "event": {"type": "nothing"}}, "nothing"),
        ({"type": "ToRank", "rank": 0, "message": {"type": "KillGroup"}}, "KillGroup"),
        ({"type": "StopAt", "point": [1, 1, None]}, "Expected `bool`, got `int`"),
    ],
)
def test_what_is_no_message_is_refused_with_its_reason(values: Any, reason: str) -> None:
    for body in (msgspec.msgpack.encode(values), json.dumps(values).encode()):
        with pytest.raises(ProtocolError) as caught:
            decode(body)
        assert caught.value.refusal == "malformed"
        assert reason in str(caught.value) or body.startswith(b"[")


@pytest.mark.parametrize(
    "body", [b"", b"\xff\xfe", b"[" * 100_000, b"{" * 100_000, b"\x91" * 100_000, pickle.dumps(messages.KillGroup())]
)
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(body)


def test_no_value_of_any_other_type_gets_into_a_field() -> None:
    others = [None, True, 1, 1.5, "text", [], [1], ["text"], [None], {}, {"a": 1}, [[1, 2]], b"bytes"]
    for message in EXAMPLES:
        good = msgspec.to_builtins(message, builtin_types=(bytes,))
        for name in good.keys() - {"type"}:
            for other in others:
                # texts that msgpack can't hold are tried below
                with suppress(ProtocolError, UnicodeEncodeError):
                    found = decode(msgspec.msgpack.encode({**good, name: other}))
                    # what is accepted is a value of that field, and travels again
                    assert decode(encode(found)) == found


def test_what_msgpack_can_not_hold_arrives_too() -> None:
    shown = Display(0, {"text/plain": "\ud800", "application/json": {"a": [10**40, -math.inf]}}, {}, 0.0)
    for message in (
        messages.ForkWorker("a", worker(text="\udcff")),
        messages.RankOutput(0, 1, b"\xff\x00", (LogLine(0, "stdout", "\udcff", 1.0),)),
        messages.RankEvent(0, 1, shown),
        messages.RankReports((messages.RankEvent(0, 1, Metric(0, "a", math.inf, 2**70, 0.0)),)),
    ):
        assert decode(encode(message)) == message
    for name in ("a", "\udcff"):
        message = messages.RankEvent(0, 1, Metric(0, name, math.nan, None, 0.0))
        assert repr(decode(encode(message))) == repr(message)
