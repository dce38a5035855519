"""Nodes meet at an endpoint that strangers reach, too: who comes is checked, and told why where it is refused."""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from accelerate_nb.config.run_config import resolve
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.launching.node_agent.agent import AgentLoop
from accelerate_nb.launching.node_agent.node_facts import facts_of_this_node
from accelerate_nb.launching.node_agent.node_network import NodeNetwork
from accelerate_nb.launching.node_agent.remote_agent import NodeLink
from accelerate_nb.launching.planning.placement import Placement
from accelerate_nb.launching.rendezvous.host import HostedRendezvous, RendezvousHost
from accelerate_nb.launching.rendezvous.host_link import HostLink
from accelerate_nb.launching.rendezvous.hosted_run import HostedNodes, PeerAgent
from accelerate_nb.launching.rendezvous.join import join
from accelerate_nb.launching.rendezvous.node_checks import reply_to
from accelerate_nb.launching.rendezvous.settings import RendezvousSettings, hosts, listen, local_placement
from accelerate_nb.transport.channel import (
    Channel,
    ReceivedMessage,
    frame,
)
from accelerate_nb.transport.memory_file import memory_file
from accelerate_nb.transport.messages import (
    CloseSession,
    ConnectToPeers,
    FilePart,
    Heartbeat,
    JoinRun,
    KillGroup,
    PeersReached,
    QueryNode,
    RankOutcome,
    ReleaseRanks,
    RunJoined,
    RunRefused,
    ToRank,
)

pytestmark = pytest.mark.timeout(30)

PLACEMENT = Placement("supervisor", 2, True, "for tests")
FACTS = facts_of_this_node("")


def settings_of(**settings: Any) -> RendezvousSettings:
    return RendezvousSettings.of(resolve({"num_nodes": 2, **settings}, {}).launching)


@contextmanager
def host(**settings: Any) -> Iterator[tuple[Future[HostedRendezvous], tuple[str, int]]]:
    """A host that waits for one other node, at an address."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    terms = replace(settings_of(**settings), port=address[1], timeout=20.0)
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(RendezvousHost(terms, listener, PLACEMENT, 0).wait), address


def asked(address: tuple[str, int], request: JoinRun) -> object:
    """The answer to a request that no node of this package made."""
    with Channel(socket.create_connection(address)) as channel:
        channel.send(request)
        return answered(channel)


def answered(channel: Channel, *, ahead: float = 0.0, unreached: str = "") -> object:
    """
    The answer to a node, which replies until then to what is checked.

    Its clock is so many seconds `ahead`, and `unreached` is why it can't connect to node 0.
    """
    with closing(NodeNetwork("127.0.0.1")) as network:
        while (received := channel.receive(10.0)) is not None:
            match received.message:
                case RunJoined() | RunRefused():
                    return received.message
                case QueryNode():
                    channel.send(structs.replace(FACTS, time=time.time() + ahead))
                case ConnectToPeers() if unreached:
                    channel.send(PeersReached({"0": unreached}))
                case message if (reply := reply_to(message, network)) is not None:
                    channel.send(reply)
    return None


def request(**values: Any) -> JoinRun:
    fields: dict[str, Any] = {
        "run_id": "none",
        "nodes": 2,
        "node_rank": 1,
        "processes": 1,
        "kind": "cpu",
        "facts": FACTS,
    }
    return JoinRun(**{**fields, **values})


def closed(rendezvous: HostedRendezvous) -> None:
    rendezvous.listener.close()
    for peer in rendezvous.peers:
        peer.channel.close()


def test_strangers_and_nodes_of_other_runs_are_refused_and_the_run_still_finds_its_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with host() as (future, address):
        payload = pickle.dumps(print)
        for raw in (b"GET / HTTP/1.1\r\n\r\n", b"\x93ANB" + payload, frame(KillGroup()), b"x" * (1 << 20), b""):
            with socket.create_connection(address) as stranger:
                try:
                    stranger.sendall(raw)
                    stranger.shutdown(socket.SHUT_WR)
                    assert b"run_joined" not in stranger.makefile("rb").read()
                except OSError:
                    # it is closed with what it sent unread
                    continue
        for values, reason in (
            ({"run_id": "other"}, "rdzv_id='other' was given on this node, and rdzv_id='none' on node 0"),
            ({"nodes": 3}, "num_nodes=3"),
            ({"node_rank": None}, "rdzv_backend='c10d'"),
            ({"node_rank": 5}, "node_rank=5 was given"),
            ({"kind": "cuda"}, "this node computes on cuda"),
        ):
            answer = asked(address, request(**values))
            assert isinstance(answer, RunRefused), values
            assert reason in answer.reason
            # node 0 says so at once, too
            assert (
                f"a node came, and was refused: {reason}".replace("this node", "that node") in capsys.readouterr().err
            )
        joined = join(replace(settings_of(node_rank=1), port=address[1]), PLACEMENT)
        rendezvous = future.result()
        assert joined.answer.sizes == (2, 2)
        assert rendezvous.run == joined.answer.run
        joined.channel.close()
        closed(rendezvous)


def test_a_node_that_came_and_went_is_waited_for_again() -> None:
    with host(num_nodes=3) as (future, address):
        for attempt in range(2):
            channel = Channel(socket.create_connection(address))
            channel.send(request(nodes=3))
            # the host says that it is there to nodes that have joined
            assert channel.receive(10.0) == ReceivedMessage(Heartbeat())
            if attempt == 0:
                channel.close()
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(answered, channel)
            assert isinstance(asked(address, request(nodes=3, node_rank=2)), RunJoined)
            assert isinstance(first.result(), RunJoined)
        channel.close()
        closed(future.result())


C10D = {"rdzv_backend": "c10d", "rdzv_conf": {"last_call_timeout": 0.5}}


def test_a_run_that_may_have_fewer_nodes_begins_with_those_that_came_before_the_last_call() -> None:
    with host(**C10D, num_nodes="2:4") as (future, address):
        gone = Channel(socket.create_connection(address))
        gone.send(request(nodes=4, node_rank=None))
        assert gone.receive(10.0) == ReceivedMessage(Heartbeat())
        terms = replace(settings_of(**C10D, num_nodes="2:4"), port=address[1])
        with ThreadPoolExecutor(1) as threads:
            joined = threads.submit(join, terms, PLACEMENT)
            gone.close()
            assert joined.result().answer.sizes == (2, 2)
        assert joined.result().answer.node_rank == 1
        assert len(future.result().peers) == 1
        joined.result().channel.close()
        closed(future.result())
    with host(**C10D, num_nodes="1:2") as (future, address):
        alone = future.result()
        assert (alone.peers, alone.address) == ((), "127.0.0.1")
        closed(alone)


def test_clocks_that_differ_are_corrected_in_what_nodes_report() -> None:
    with host() as (future, address), Channel(socket.create_connection(address)) as channel:
        channel.send(request())
        assert isinstance(answered(channel, ahead=3600.0), RunJoined)
        nodes = HostedNodes(future.result(), PLACEMENT, settings_of(), 0)
        (peer,) = future.result().peers
        assert nodes._link(peer).clock_offset == pytest.approx(3600.0, abs=5.0)
        nodes.close()


def test_a_node_that_can_not_connect_to_another_one_is_named_to_both_before_anything_starts() -> None:
    with host() as (future, address), Channel(socket.create_connection(address)) as channel:
        channel.send(request())
        answer = answered(channel, unreached="nothing came back for 4 s")
        text = r"node 1 on .* can't connect to port \d+ of node 0 on .* \(127.0.0.1, lo\): nothing came back for 4 s"
        with pytest.raises(LaunchError, match=text) as caught:
            future.result()
        assert isinstance(answer, RunRefused)
        assert answer.reason == str(caught.value)


def test_a_stranger_fills_no_memory_before_it_has_proved_itself() -> None:
    with host() as (future, address):
        for flood in (FilePart(1000, False), RunRefused("x" * 40_000)):
            with socket.create_connection(address, 5.0) as stranger:
                stranger.sendall(frame(flood))
                # it is refused at once, and not only once its time is over
                assert answered_bytes(stranger) == b""
        joined = join(replace(settings_of(node_rank=1), port=address[1]), PLACEMENT)
        joined.channel.close()
        closed(future.result())


def answered_bytes(stranger: socket.socket) -> bytes:
    try:
        return stranger.recv(1)
    except ConnectionResetError:
        return b""


def test_a_rank_that_is_taken_and_other_versions_are_reported_to_both() -> None:
    with host(num_nodes=3) as (future, address):
        with Channel(socket.create_connection(address)) as first:
            first.send(request(nodes=3))
            received = first.receive(10.0)
            assert received is not None
            answer = asked(address, request(nodes=3))
            assert isinstance(answer, RunRefused)
            assert "node 1 on" in answer.reason
            other = asked(address, request(nodes=3, node_rank=2, facts=structs.replace(FACTS, torch="2.1.0")))
            assert isinstance(other, RunRefused)
            assert "2.1.0" in other.reason
            with pytest.raises(LaunchError, match=r"node 2 on .* \(differs\)"):
                future.result()


def test_a_node_carries_out_no_code_of_node_0() -> None:
    near, far = socket.socketpair()
    link = HostLink(Channel(near, passes_descriptors=False), "node 0", "127.0.0.1")
    link.start()
    with Channel(far, passes_descriptors=False) as host_channel:
        host_channel.send(ToRank(0, CloseSession()))
        host_channel.send(ReleaseRanks((0,)))
        # the first order is what came second
        assert link.next_order() == ReleaseRanks((0,))
    link.close()


def test_node_0_unpickles_nothing_of_a_node() -> None:
    near, far = socket.socketpair()
    reports: list[object] = []
    with AgentLoop() as loop, Channel(far, passes_descriptors=False) as node:
        agent = PeerAgent(
            Channel(near, passes_descriptors=False),
            loop,
            lambda message, _: reports.append(message),
            NodeLink(),
            sizes=(1, 1),
            port=0,
            running={},
            on_stop=print,
            on_session_report=print,
        )
        agent._begin((0,))
        node.send(RankOutcome(0, 0), [memory_file("outcome")])
        node.shutdown()
        agent.close()
        agent.tick(0.0, 0.0)
    assert not any(isinstance(report, RankOutcome) for report in reports)
    assert not agent.has_outcomes


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
    for settings, message in (({"rdzv_endpoint": "a:b"}, "is no port"), ({"rdzv_conf": {"ttl": 3}}, "has ttl")):
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
