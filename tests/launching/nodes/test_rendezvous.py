"""Nodes meet at an endpoint that strangers reach, too: who comes is checked, and told why where it is refused."""

import pickle
import queue
import socket
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from accelerate_nb.config.run_config import resolve
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.launching.node_agent.node_network import facts_of_this_node
from accelerate_nb.launching.nodes import launched_nodes, rendezvous
from accelerate_nb.launching.nodes.launched_nodes import LaunchedNodes, NodeExchange
from accelerate_nb.launching.nodes.rendezvous import (
    HostNodes,
    MemberNodes,
    RendezvousSettings,
    hosts,
    listen,
    local_placement,
)
from accelerate_nb.launching.planning.placement import Placement
from accelerate_nb.transport import messages
from accelerate_nb.transport.channel import frame
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)

PLACEMENT = Placement("supervisor", 2, True, "for tests")


def settings_of(**settings: Any) -> RendezvousSettings:
    return RendezvousSettings.of(resolve({"num_nodes": 2, **settings}, {}).launching)


class Meeting:
    """Node 0, which waits for the others in a thread, and calls by which others join it with settings of their own."""

    def __init__(self, threads: ThreadPoolExecutor, **settings: Any) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self._settings, self.port = settings, int(listener.getsockname()[1])
        terms = replace(settings_of(**settings), port=self.port, timeout=20.0)
        self.nodes = HostNodes(listener, PLACEMENT, terms, resolve({"num_nodes": 2, **settings}, {}))
        self.met = threads.submit(self.nodes.meet)

    def join(self, *, placement: Placement = PLACEMENT, timeout: float = 20.0, **given: Any) -> MemberNodes:
        own = {} if self._settings.get("rdzv_backend") == "c10d" else {"node_rank": 1}
        terms = replace(settings_of(**{**self._settings, **own, **given}), port=self.port, timeout=timeout)
        return MemberNodes.joining(placement, terms)


@contextmanager
def host(**settings: Any) -> Iterator[Meeting]:
    with ThreadPoolExecutor(1) as threads:
        meeting = Meeting(threads, **settings)
        try:
            yield meeting
        finally:
            meeting.nodes.leave("the test is over")


def left(*nodes: LaunchedNodes) -> None:
    with ThreadPoolExecutor(len(nodes)) as threads:
        list(threads.map(lambda node: node.leave("the test is over"), nodes))


def test_strangers_and_nodes_of_other_runs_are_refused_and_the_run_still_finds_its_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with host() as meeting:
        for values, reason in (
            ({"rdzv_id": "other"}, "rdzv_id='other' was given on this node, and rdzv_id='none' on node 0"),
            ({"num_nodes": 3}, "num_nodes=3"),
            ({"rdzv_backend": "c10d"}, "rdzv_backend='c10d'"),
            ({"num_nodes": 9, "node_rank": 5}, "num_nodes=9"),
            ({"placement": replace(PLACEMENT, kind="cuda")}, "this node computes on cuda"),
        ):
            with pytest.raises(LaunchError) as caught:
                meeting.join(**values)
            assert reason in str(caught.value)
            # node 0 says so at once, too
            told = f"a node came, and was refused: {reason}".replace("this node", "that node")
            assert told in capsys.readouterr().err
        member = meeting.join()
        assert member.roster.sizes == (2, 2)
        meeting.met.result()
        assert meeting.nodes.run == member.run
        left(member, meeting.nodes)


def test_what_a_stranger_sends_is_neither_unpickled_nor_in_the_way() -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("it was unpickled",))

    with host(num_nodes="1:2", rdzv_backend="c10d", rdzv_conf={"last_call_timeout": 3}) as meeting:
        evil = pickle.dumps(Evil())
        for raw in (
            evil,
            b"GET / HTTP/1.1",
            frame(messages.NodeMessage(7, None, 0, evil)),
            frame(messages.KillGroup()),
        ):
            with socket.create_connection(("127.0.0.1", meeting.port)) as stranger:
                stranger.sendall(raw)
        member = meeting.join()
        assert member.roster.sizes == (2, 2)
        left(member, meeting.nodes)


@pytest.mark.parametrize(
    ("greeting", "error", "text"),
    [
        (b"HTTP/1.1 400 Bad Request", ConnectionError, "does not answer as a node"),
        # the version of the messages, after the magic
        (
            frame(messages.Heartbeat())[:4] + b"\x63" + frame(messages.Heartbeat())[5:],
            LaunchError,
            "another release .* has version 99",
        ),
    ],
)
def test_what_listens_and_is_no_node_of_this_release_is_named(
    greeting: bytes, error: type[Exception], text: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        joining = threads.submit(NodeExchange.joined, "127.0.0.1", int(server.getsockname()[1]), 5.0)
        with server.accept()[0] as sock:
            sock.sendall(greeting)
            with pytest.raises(error, match=text):
                joining.result()


def test_a_node_that_came_and_went_is_waited_for_again() -> None:
    with host(num_nodes=3) as meeting, ThreadPoolExecutor(2) as threads:
        with pytest.raises(LaunchError, match="not all nodes have come"):
            meeting.join(timeout=2.0)
        members = [threads.submit(meeting.join), threads.submit(meeting.join, node_rank=2)]
        assert [member.result().joined.node_rank for member in members] == [1, 2]
        left(meeting.nodes, *(member.result() for member in members))


def test_nodes_meet_whatever_timeout_the_notebook_has_for_new_sockets() -> None:
    socket.setdefaulttimeout(0.3)
    try:
        with host(num_nodes=3) as meeting, ThreadPoolExecutor(2) as threads:
            members = [*threads.map(lambda rank: meeting.join(node_rank=rank, timeout=10.0), (1, 2))]
            left(meeting.nodes, *members)
    finally:
        socket.setdefaulttimeout(None)


C10D = {"rdzv_backend": "c10d", "rdzv_conf": {"last_call_timeout": 0.5}}


def test_a_run_that_may_have_fewer_nodes_begins_with_those_that_came_before_the_last_call() -> None:
    with host(**C10D, num_nodes="2:4") as meeting:
        member = meeting.join()
        assert (member.roster.sizes, member.joined.node_rank) == ((2, 2), 1)
        left(member, meeting.nodes)
    with host(**C10D, num_nodes="1:2") as meeting:
        meeting.met.result()
        alone = meeting.nodes
        assert (alone.roster.sizes, alone.master[0].host) == ((2,), "127.0.0.1")
        # a late one waits, and gets to know for what
        with pytest.raises(
            LaunchError, match="a run is under way there, in which this node takes part when it starts again"
        ):
            meeting.join(timeout=2.0)


def test_of_nodes_that_come_together_those_without_a_place_wait_and_know_for_what() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    terms = replace(settings_of(**C10D), port=int(listener.getsockname()[1]), timeout=20.0)
    nodes = HostNodes(listener, PLACEMENT, terms, resolve({"num_nodes": 2, **C10D}, {}))
    with ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(MemberNodes.joining, PLACEMENT, replace(terms, timeout=2.0)) for _ in range(2)]
        until(lambda: len(nodes._waiting) == 2)
        nodes.meet()
        (late,) = (str(item.exception()) for item in joining if item.exception())
        assert "a run is under way there, of which all nodes have come already" in late
        left(nodes, *(item.result() for item in joining if not item.exception()))


def test_a_node_that_goes_as_the_run_begins_is_reported_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with host() as meeting, ThreadPoolExecutor(1) as threads:

        def late() -> uuid.UUID:
            meeting.nodes._exchange._channels[1].shutdown()
            until(lambda: bool(meeting.nodes._gone))
            return uuid.UUID(int=0)

        # made when places are chosen, and not yet known
        monkeypatch.setattr(rendezvous.uuid, "uuid4", late)
        member = threads.submit(meeting.join, timeout=2.0)
        meeting.met.result()
        assert [report.ranks for report in meeting.nodes.reports(0) if isinstance(report, messages.AgentLost)] == [
            (2, 3)
        ]
        with pytest.raises(LaunchError, match="there was no run for this node"):
            member.result()


def test_a_node_that_can_not_connect_to_another_one_is_named_to_both_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        launched_nodes.node_network, "connect", lambda _: messages.PeersReached({"0": "nothing came back for 4 s"})
    )
    with host() as meeting:
        text = r"node 1 on .* can't connect to port \d+ of node 0 on .* \(127.0.0.1, lo\): nothing came back for 4 s"
        with pytest.raises(LaunchError, match=text):
            meeting.join()
        with pytest.raises(LaunchError, match=text):
            meeting.met.result()


def test_a_rank_that_is_taken_and_other_versions_are_reported_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    other = structs.replace(facts_of_this_node(""), torch="2.1.0")
    with host(num_nodes=3) as meeting, ThreadPoolExecutor(1) as threads:
        first = threads.submit(meeting.join)
        until(lambda: meeting.nodes._members)
        with pytest.raises(LaunchError, match=r"node 1 on .* has joined as that already"):
            meeting.join()
        assert "node_rank=1 was given" in meeting.nodes._objections[0]
        monkeypatch.setattr(rendezvous.node_network, "facts_of_this_node", lambda _: other)
        for call in (lambda: meeting.join(node_rank=2), first.result, meeting.met.result):
            with pytest.raises(LaunchError, match=r"(?s)node 2 on .* \(differs\).*2\.1\.0"):
                call()


def test_a_node_that_is_launched_again_while_the_last_run_still_ends_waits_for_the_next_one() -> None:
    with host() as meeting, ThreadPoolExecutor(1) as threads:
        first = meeting.join()
        meeting.met.result()
        again = threads.submit(meeting.join)
        until(lambda: meeting.nodes._waiting)
        left(first, meeting.nodes)
        listener = socket.create_server(("127.0.0.1", meeting.port))
        terms = replace(settings_of(), port=meeting.port, timeout=20.0)
        following = HostNodes(listener, PLACEMENT, terms, resolve({"num_nodes": 2}, {}))
        following.meet()
        assert again.result().run == following.run
        left(again.result(), following)


def test_a_node_carries_out_no_code_of_another_one_and_the_end_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with host() as meeting:
        member = meeting.join()
        for message in (
            messages.RankOutcome(0, 0),
            messages.StartWorkers(()),
            messages.KillGroup(),
            messages.RequestStop("finish"),
        ):
            meeting.nodes.post(message, 0)
        stops: queue.SimpleQueue[str] = queue.SimpleQueue()
        member.on_stop_elsewhere(stops.put)
        # that came last, and nothing before it was a report
        assert stops.get(timeout=10) == "finish"
        assert not [*member.reports(0)]
        left(member, meeting.nodes)
    assert set(threading.enumerate()) <= before


def test_a_stop_of_another_node_holds_also_where_it_came_before_this_one_s_run_was_made() -> None:
    with host() as meeting:
        member = meeting.join()
        member.stop("interrupt")
        until(lambda: meeting.nodes._stop)
        stops: list[str] = []
        meeting.nodes.on_stop_elsewhere(stops.append)
        assert stops == ["interrupt"]
        left(member, meeting.nodes)


@pytest.mark.parametrize(
    ("settings", "endpoint", "node_rank"),
    [
        ({"master_addr": "10.0.0.1"}, "10.0.0.1:29500", 0),
        ({"master_addr": "head", "use_port": 1234, "node_rank": 1}, "head:1234", 1),
        ({"rdzv_endpoint": "10.0.0.7", "rdzv_backend": "c10d"}, "10.0.0.7:29500", None),
        ({"rdzv_endpoint": "[2001:db8::1]:29400"}, "[2001:db8::1]:29400", 0),
    ],
)
def test_the_endpoint_is_read_as_torchrun_reads_it(
    settings: dict[str, Any], endpoint: str, node_rank: int | None
) -> None:
    found = settings_of(**settings)
    assert (found.endpoint, found.node_rank) == (endpoint, node_rank)


def test_what_can_t_be_read_is_refused() -> None:
    for settings, message in (
        ({"rdzv_endpoint": "a:b"}, "is no port"),
        ({"rdzv_conf": {"ttl": 3}}, "has ttl"),
        ({"rdzv_conf": {"timeout": None}}, "a value is no number"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            settings_of(**settings)
    with pytest.raises(ConfigurationError, match="can't share them evenly"):
        local_placement(resolve({"num_nodes": 2, "num_processes": 3}, {}), AvailableDevices("cpu", "CPU", 0, 2))


def test_the_host_is_node_0_or_who_has_the_address() -> None:
    assert hosts(settings_of(master_addr="192.0.2.1"))
    assert not hosts(settings_of(node_rank=1))
    c10d = {"rdzv_backend": "c10d"}
    assert hosts(settings_of(**c10d, rdzv_endpoint="127.0.0.1:1"))
    assert not hosts(settings_of(**c10d, rdzv_endpoint="192.0.2.1:1"))
    assert hosts(settings_of(**c10d, rdzv_endpoint="192.0.2.1:1", rdzv_conf={"is_host": "1"}))


def test_of_two_nodes_of_a_machine_the_first_has_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert listen(replace(settings_of(rdzv_backend="c10d"), port=port)) is None
        with pytest.raises(LaunchError, match="can't listen there"):
            listen(replace(settings_of(), port=port))
