"""A message arrives as it was sent, and what is none is refused with its reason."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from accelerate_nb.errors import ProtocolError
from accelerate_nb.events.model import HostSample, LogLine, StateChange
from accelerate_nb.rank.stop_request import StopPoint, TrainingPosition
from accelerate_nb.transport.protocol.agent_messages import (
    AgentLost,
    CloseGroup,
    ConnectToPeers,
    GroupClosed,
    Heartbeat,
    HoldRanks,
    ListenToPeers,
    NetworkAddress,
    NodeFacts,
    NodeLoad,
    PeerEndpoint,
    PeersReached,
    QueryNode,
    QueryRankCollectives,
    QueryRankLog,
    QueryRankStacks,
    RankCollectives,
    RankEvent,
    RankExited,
    RankHeld,
    RankLog,
    RankOutcome,
    RankOutput,
    RankReports,
    RankStacks,
    RankTaskReply,
    ReleaseRanks,
    StartWorkers,
    StopRankAt,
    ToRank,
)
from accelerate_nb.transport.protocol.host_messages import HostFailed, HostNotice, HostReady
from accelerate_nb.transport.protocol.knob_messages import ChangeKnob, ChangeKnobAfter, HoldForKnob
from accelerate_nb.transport.protocol.message import Message
from accelerate_nb.transport.protocol.message_codec import decode, encode
from accelerate_nb.transport.protocol.messages import (
    TAGS,
    BeginTask,
    BeginWorker,
    CloseSession,
    CollectivesReply,
    FetchRankLog,
    FilePart,
    ForkFailed,
    ForkSupervisor,
    ForkWorker,
    HoldAtBoundary,
    HoldReply,
    ImportModules,
    InterruptTask,
    KillGroup,
    LeaveGroup,
    LiveState,
    OpenGroup,
    QueryCollectives,
    QueryLiveState,
    QueryStacks,
    RankLogFile,
    SignalRanks,
    StacksReply,
    StopAt,
    StopRun,
    SupervisorStarted,
    WorkerExited,
    WorkerStarted,
)
from accelerate_nb.transport.protocol.node_messages import (
    BreakGroups,
    EndRun,
    EndSession,
    JoinRun,
    MembershipGranted,
    RebuildGroups,
    RequestMembership,
    RequestStop,
    RunEvent,
    RunJoined,
    RunRefused,
    StartGroup,
)
from accelerate_nb.transport.protocol.profile_messages import ProfileSteps, RequestProfile
from accelerate_nb.transport.rank_info import MasterAddress, RankInfo
from accelerate_nb.transport.worker_spec import (
    LocalWorker,
    PayloadReference,
    ProcessEnvironment,
    WorkerDescriptors,
    WorkerSpec,
)


def worker(rank: int = 0, text: str = "") -> LocalWorker:
    """A worker with a text in its environment."""
    return LocalWorker(
        WorkerSpec(
            RankInfo(rank, 4, rank % 2, 2, MasterAddress("10.0.0.1", 12345), "abc", node_rank=rank // 2, nodes=2),
            ProcessEnvironment({"TEXT": text}, "/tmp", ("", "/lib"), ("x",), "00ff", None),
            PayloadReference(4096, 1) if rank else None,
        ),
        WorkerDescriptors(3, 4, 5, 6, 7, payload=8, more=(9, 10)),
    )


EXAMPLES = [
    OpenGroup("grüße/0"),
    ForkSupervisor(),
    ForkWorker("a/0", (worker(0), worker(1, 'text "\udcff"\n'))),
    ImportModules(("torch", "numpy"), 2.0),
    ImportModules((), 0),
    SignalRanks(2, (0,)),
    KillGroup(),
    SupervisorStarted(77),
    WorkerStarted((0, 1), 77),
    WorkerExited((1,), -9),
    ForkFailed((1,), 11),
    BeginWorker((worker(3),)),
    HoldAtBoundary(),
    StopAt(StopPoint(7, True)),
    StopAt(StopPoint(7, False, 3)),
    QueryCollectives(),
    LeaveGroup(),
    BeginTask(1, None, ()),
    BeginTask(1, "1", (77, 78)),
    InterruptTask(1, (77,)),
    CloseSession(),
    HoldReply(None),
    HoldReply(TrainingPosition(7, 0.25, False, True, 2)),
    HoldRanks((0, 1)),
    StopRankAt(1, StopPoint(7, True)),
    ReleaseRanks((0,)),
    RankEvent(1, 0, StateChange(1, "running", 2.0)),
    RankOutput(1, 1, b"line \xff\x00\n", (LogLine(1, "stdout", "line", 2.0),)),
    RankReports((RankOutput(1, 1, b"line\n", (LogLine(1, "stdout", "line", 2.0),)), RankExited(1, 2, -9, 1.5))),
    RankOutput(1, 2, b"line\n", (), 3 << 30, "/logs/rank_1.log"),
    QueryRankLog(4, "/logs/rank_1.log", 1 << 20, 4096),
    RankLog(4, b"\x00\xff", 1 << 40),
    RankHeld(1, 2, TrainingPosition(7, 0.25, False)),
    RankTaskReply(1, 3, 7),
    RankOutcome(1, 4),
    RankExited(1, 5, -9, 2.0, "Current thread"),
    NodeLoad(HostSample(50.0, (1, 2), None, None, 2.0, node=1)),
    AgentLost((0, 1), "it ended with code 1", 2.0),
    JoinRun(
        "none", 2, None, 1, "cpu", NodeFacts("a", "10.0.0.1", "3.11.7", "2.13.0", "0.1.0", "cpu", "CPU", 0, 2, 1.5)
    ),
    RunJoined("run", 1, ("node 0 on a", "node 1 on b"), (1, 1), 0),
    RunRefused("node_rank=1 is taken"),
    RequestMembership("box"),
    HostNotice("waits\n"),
    HostReady(),
    HostFailed("LaunchError", "it has no room"),
    MembershipGranted("box-2"),
    StartGroup(1, 1, (2, 1), 29500),
    RunEvent(StateChange(0, "finished", 1.0)),
    RequestStop("finish"),
    BreakGroups(3, "rank 1 stopped with ValueError: no"),
    RebuildGroups(4, "node 1 on b", "rank 1 stopped with ValueError: no"),
    EndSession("the session was closed on node 1 on b"),
    EndRun("failed", "", None, (StateChange(0, "failed", 1.0),), "launch", "The workers were lost"),
    StartWorkers(((worker(0).spec,), (worker(1).spec, worker(2).spec)), True),
    ToRank(1, InterruptTask(1, (77,))),
    QueryRankStacks(1, (0, 1)),
    RankStacks(1, {"0": "Current thread", "1": ""}),
    QueryRankCollectives(2, (0,)),
    RankCollectives(2, {"0": ({"group": "0", "sizes": [[2, 2]]},)}),
    CloseGroup(),
    GroupClosed(),
    QueryNode(),
    NodeFacts("a", "10.0.0.1", "3.11.7", "2.13.0+cpu", "0.1.0", "cuda", "GPU", 8, 96, 1700000000.5),
    ListenToPeers(0, ("10.0.0.2", "fe80::1")),
    PeerEndpoint("10.0.0.1", 40001, "eth0", "no such port"),
    ConnectToPeers((NetworkAddress("10.0.0.1", 40001), NetworkAddress("10.0.0.2", 40002)), 4.0),
    PeersReached({"1": "nothing came back"}),
    Heartbeat(),
    FilePart(256, False),
    HoldForKnob(1, 3),
    ChangeKnobAfter(3, "lr", 1e-4, 17),
    ChangeKnob("lr", 1e-4),
    ProfileSteps(1, 3, 10, "/runs/1"),
    RequestProfile(10, (0, 2)),
    CollectivesReply(({"group": "0", "number": 3, "sizes": [[2, 2]]},)),
    StopRun("finish"),
    QueryStacks(),
    QueryLiveState(),
    FetchRankLog(1),
    RankLogFile("/runs/1/fetched/rank_1.log"),
    StacksReply("rank 0:\n  grüße"),
    LiveState(True, ({"type": "metric", "value": 0.5},)),
]


def refusal_of(body: bytes) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode(body)
    return f"{caught.value.refusal}: {caught.value}"


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    body = encode(message)
    assert body.isascii()
    assert b"\n" not in body
    assert decode(body) == message


def test_every_message_has_a_tag_and_an_example() -> None:
    assert {type(message) for message in EXAMPLES} == set(TAGS.values())
    # `slots=True` makes a second class of each
    assert {message_class.__name__ for message_class in Message.__subclasses__()} == {
        message_class.__name__ for message_class in TAGS.values()
    }
    assert len(set(TAGS.values())) == len(TAGS)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_can_not_change(message: Message) -> None:
    assert is_dataclass(message)
    for name in [field.name for field in fields(message)]:
        with pytest.raises(FrozenInstanceError):
            setattr(message, name, None)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "malformed: a message is no JSON"),
        (b"\xff\xfe", "malformed: a message is no JSON"),
        (b"[" * 100_000, "malformed: a message is no JSON"),
        (b"[]", "malformed: a message is no object, but list"),
        (b"{}", "unknown: a message is of type 'None'"),
        (b'{"type": ["kill_group"]}', "unknown: "),
        (b'{"type": "do_it"}', "unknown: a message is of type 'do_it'; known types are open_group"),
        (b'{"type": "kill_group", "now": 1}', "malformed: a message of type 'kill_group' was refused: it has unknown"),
        (b'{"type": "signal_ranks", "number": 2}', "malformed: a message of type 'signal_ranks' was refused: it lacks"),
        (b'{"type": "begin_worker", "workers": [{"spec": {}}]}', "workers: it lacks descriptors"),
        (b'{"type": "begin_worker", "workers": [{"spec": {}, "descriptors": 1}]}', "workers: spec: it lacks"),
        (b'{"type": "open_group", "run": null}', "run: str was expected, not NoneType"),
        (b'{"type": "signal_ranks", "number": true, "ranks": []}', "number: int was expected, not bool"),
        (b'{"type": "signal_ranks", "number": 2.0, "ranks": []}', "number: int was expected, not float"),
        (b'{"type": "signal_ranks", "number": 2, "ranks": "01"}', "ranks: list was expected, not str"),
        (b'{"type": "signal_ranks", "number": 2, "ranks": [0, "1"]}', "ranks: int was expected, not str"),
        (b'{"type": "begin_task", "number": 1, "renewal": 1, "others": []}', "renewal: NoneType was expected, not int"),
        (b'{"type": "rank_event", "rank": 0, "number": 0, "event": {"type": "nothing"}}', "event: it is no event"),
        (b'{"type": "stop_at", "point": [1, true]}', "point: 3 items were expected, not 2"),
        (b'{"type": "stop_at", "point": [1, 1, null]}', "point: bool was expected, not int"),
        (b'{"type": "collectives_reply", "entries": [1]}', "entries: dict was expected, not int"),
    ],
)
def test_what_is_no_message_is_refused_with_its_reason(body: bytes, reason: str) -> None:
    assert reason in refusal_of(body)


def test_no_value_of_any_other_type_gets_into_a_field() -> None:
    others = [None, True, 1, 1.5, "text", [], [1], ["text"], [None], {}, {"a": 1}, [[1, 2]]]
    for message in EXAMPLES:
        good = json.loads(encode(message))
        for name in good.keys() - {"type"}:
            for other in others:
                with suppress(ProtocolError):
                    found = decode(json.dumps({**good, name: other}).encode())
                    # what is accepted is a value of that field, and travels again
                    assert decode(encode(found)) == found
