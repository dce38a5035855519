"""The agent of a machine that joins a notebook: it proves the token, then serves until it is interrupted or the notebook ends."""

from __future__ import annotations

import signal
import socket
from types import FrameType

from accelerate_nb.errors import LaunchError, ProtocolError
from accelerate_nb.launching.engines.supervisor import SupervisorEngine
from accelerate_nb.launching.joining.join_ticket import JoinTicket
from accelerate_nb.launching.node_agent.agent_process import AgentServer, serve_warm
from accelerate_nb.launching.node_agent.node_network import NodeNetwork, probe_connection
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.handshake import prove_token
from accelerate_nb.transport.messages import (
    MembershipGranted,
    RequestMembership,
)

_TIMEOUT = 10.0


class JoinedAgent:
    """
    This machine as a node of the notebook of a ticket, under a name.

    >>> with JoinedAgent(JoinTicket.parse(text), "box") as agent:
    ...     agent.serve()
    """

    def __init__(self, ticket: JoinTicket, name: str) -> None:
        self._ticket = ticket
        sock = self._connected()
        self._address = str(sock.getsockname()[0])
        self._channel = Channel(sock)
        try:
            self.name = self._admitted(name)
        except BaseException:
            self._channel.close()
            raise

    def serve(self) -> bool:
        """Serve in the main thread; whether the notebook has ended it, rather than a signal of this machine."""
        server = AgentServer(self._channel, SupervisorEngine(), NodeNetwork(self._address))
        received: list[int] = []

        def end(number: int, _: FrameType | None) -> None:
            received.append(number)
            server.end()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, end)
        with self._channel:
            serve_warm(server)
        return not received

    def _connected(self) -> socket.socket:
        """A connection over which both ends have proved the token."""
        endpoint = self._ticket.endpoint
        try:
            sock = socket.create_connection((self._ticket.host, self._ticket.port), _TIMEOUT)
        except OSError as error:
            raise LaunchError(
                f"Joining the notebook at {endpoint} was requested, and nothing can be reached there: {error.strerror or error}. A notebook "
                "listens only while a launch waits for machines: launch again there, or let its firewall pass that port."
            ) from None
        try:
            prove_token(sock, self._ticket.key, _TIMEOUT)
            probe_connection(sock)
        except (ProtocolError, OSError) as error:
            sock.close()
            raise LaunchError(
                f"Joining the notebook at {endpoint} was requested, and this machine was not let in: {error}. Copy the newest line that "
                "the notebook has printed."
            ) from None
        return sock

    def _admitted(self, name: str) -> str:
        """The name that the notebook gives to this machine."""
        try:
            return self._channel.request(RequestMembership(name), MembershipGranted, _TIMEOUT).name
        except OSError:
            raise LaunchError(
                f"Joining the notebook at {self._ticket.endpoint} as {name!r} was requested, and it has closed the connection: it waits no "
                "more, has another release of accelerate_nb, or takes no such name. Launch again there, with the same release, or pass "
                "another --name."
            ) from None
