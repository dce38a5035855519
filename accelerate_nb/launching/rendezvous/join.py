"""A node that joins a rendezvous which another one hosts."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass

from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.node_agent.node_facts import facts_of_this_node
from accelerate_nb.launching.node_agent.node_network import NodeNetwork
from accelerate_nb.launching.planning.placement import Placement
from accelerate_nb.launching.rendezvous.node_checks import reply_to
from accelerate_nb.launching.rendezvous.peers import WaitNotice, probe_connection
from accelerate_nb.launching.rendezvous.settings import RendezvousSettings
from accelerate_nb.transport.channel import (
    Channel,
    ReceivedMessage,
)
from accelerate_nb.transport.messages import (
    Heartbeat,
    JoinRun,
    RunJoined,
    RunRefused,
)

_CONNECT_TIMEOUT = 5.0
# Between two tries, in seconds.
_PAUSE = 0.25
# The host of a rendezvous says so often that it is there, that so many seconds of silence end a try.
_SILENCE_LIMIT = 10.0


@dataclass(frozen=True, slots=True)
class JoinedRendezvous:
    """This node's place in a run: the channel to the node that hosts it, that one's address, this one's, and the answer."""

    channel: Channel
    host: str
    address: str
    answer: RunJoined


def join(settings: RendezvousSettings, placement: Placement) -> JoinedRendezvous:
    """
    Join the run, as soon as its host is there, and wait for all nodes.

    Raises `LaunchError` where they don't come in time, or the host refuses this node.
    """
    notice, deadline, trouble = WaitNotice(), time.monotonic() + settings.timeout, ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            sock = socket.create_connection((settings.host, settings.port), min(_CONNECT_TIMEOUT, left))
        except OSError as error:
            trouble = error.strerror or str(error)
            notice.say(f"waiting for node 0 at {settings.endpoint} ({trouble}), up to {settings.timeout:g} s")
            time.sleep(_PAUSE)
            continue
        sock.settimeout(None)
        probe_connection(sock)
        notice.say(f"node 0 is there, at {settings.endpoint}; waiting for the other nodes")
        address = str(sock.getsockname()[0])
        with ExitStack() as failing, closing(NodeNetwork(address)) as network:
            channel = failing.enter_context(Channel(sock))
            answer = _answer(channel, settings, placement, deadline, network)
            if isinstance(answer, RunJoined):
                failing.pop_all()
                return JoinedRendezvous(channel, str(sock.getpeername()[0]), address, answer)
            trouble = answer
        time.sleep(_PAUSE)
    raise LaunchError(
        f"A run of {settings.nodes} nodes was requested, and after {settings.timeout:g} s there was no run for this node at "
        f"{settings.endpoint}: {trouble}. To go on, {settings.advice}."
    )


def _answer(
    channel: Channel, settings: RendezvousSettings, placement: Placement, deadline: float, network: NodeNetwork
) -> RunJoined | str:
    """The host's answer, or why there is none yet; raises `LaunchError` where it refuses this node. What it checks until then is replied to."""
    facts = facts_of_this_node("")
    request = JoinRun(settings.run_id, settings.nodes, settings.node_rank, placement.size, placement.kind, facts)
    if not channel.try_send(request):
        return "it closes connections"
    while (left := deadline - time.monotonic()) > 0:
        try:
            received = channel.receive(min(_SILENCE_LIMIT, left))
        except TimeoutError:
            return "something listens there, and does not answer as a node"
        except OSError as error:
            return f"its connection has ended: {error.strerror or error}"
        if received is None and channel.error is not None and channel.error.refusal == "version":
            raise LaunchError(
                f"A run of {settings.nodes} nodes was requested, and node 0 at {settings.endpoint} has another release of accelerate_nb: "
                f"{channel.error}. Install the same release on all nodes."
            )
        if received is None:
            return "something listens there, and closes connections: another program, or a run that has begun without this node"
        match received.message:
            case RunJoined() as answer if _is_sound(answer, settings, placement):
                return answer
            case RunRefused(reason):
                raise LaunchError(
                    f"A run of {settings.nodes} nodes was requested, and node 0 at {settings.endpoint} refuses this one: {reason}."
                )
            case _:
                _reply(channel, received, network)
    return "not all nodes have come"


def _reply(channel: Channel, received: ReceivedMessage, network: NodeNetwork) -> None:
    """Reply to what the host checks."""
    if (reply := reply_to(received.message, network)) is not None:
        channel.try_send(reply)
    elif not isinstance(received.message, Heartbeat):
        channel.refuse(received)


def _is_sound(answer: RunJoined, settings: RendezvousSettings, placement: Placement) -> bool:
    """Whether an answer fits what this node asked for."""
    nodes = len(answer.sizes)
    # how many are needed is node 0's to say
    is_complete = nodes == len(answer.names) <= settings.nodes and min(answer.sizes, default=0) > 0
    return is_complete and 0 < answer.node_rank < nodes and answer.sizes[answer.node_rank] == placement.size
