"""A machine that joins a notebook by a pasted line: the ticket of that line, and the agent, which proves its token and serves until it is interrupted or the notebook ends."""

from __future__ import annotations

import re
import secrets
import signal
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from accelerate_nb.errors import ConfigurationError, LaunchError, ProtocolError
from accelerate_nb.launching.node_agent.agent_process import AgentServer, serve_warm
from accelerate_nb.launching.node_agent.node_network import NodeNetwork, probe_connection
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.handshake import prove_token
from accelerate_nb.transport.messages import MembershipGranted, RequestMembership

# The variable of the environment that holds a ticket, for those who want it in no list of processes.
VARIABLE = "ACCELERATE_NB_JOIN"
_TOKEN_SIZE = 16
_TEXT = re.compile(rf"(?P<token>[0-9a-f]{{{2 * _TOKEN_SIZE}}})@(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^@:\s]+)):(?P<port>\d+)")


def new_token() -> str:
    """A token of 128 random bits, as hexadecimal digits."""
    return secrets.token_hex(_TOKEN_SIZE)


@dataclass(frozen=True, slots=True)
class JoinTicket:
    """A token, which no `repr` shows, and where a notebook waits for machines; as a text TOKEN@HOST:PORT."""

    token: str = field(repr=False)
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.token}@{self.endpoint}"

    @classmethod
    def parse(cls, text: str) -> JoinTicket:
        """The ticket of a text; raises `ConfigurationError`, which does not repeat the token."""
        found = _TEXT.fullmatch(text.strip())
        if found is None or not 0 < int(found["port"]) < 65536:
            raise ConfigurationError(
                f"A text of {len(text.strip())} characters was given, which is no TOKEN@HOST:PORT. Copy the whole line that the notebook "
                "has printed: accelerate-nb join TOKEN@HOST:PORT."
            )
        return cls(found["token"], found["v6"] or found["host"], int(found["port"]))

    @property
    def endpoint(self) -> str:
        """The address and the port as a person writes them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def key(self) -> bytes:
        """The token's bytes."""
        return bytes.fromhex(self.token)


def given_ticket(text: str | None, environment: Mapping[str, str]) -> JoinTicket:
    """The ticket of a command line: itself, `@FILE`, or nothing for that of the environment; raises `ConfigurationError` without one."""
    if text is None:
        text = environment.get(VARIABLE)
    if not text:
        raise ConfigurationError(
            f"No ticket was given. Copy the whole line that the notebook has printed (accelerate-nb join TOKEN@HOST:PORT), name a file "
            f"that has it (@FILE), or set {VARIABLE}."
        )
    if text.startswith("@"):
        try:
            text = Path(text[1:]).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"{text!r} was given, and that file can't be read: {error}. Name the file that has TOKEN@HOST:PORT."
            ) from None
    return JoinTicket.parse(text)


_TIMEOUT = 10.0


class JoinedAgent:
    """This machine as a node of the notebook of a ticket, under a name."""

    def __init__(self, ticket: JoinTicket, name: str) -> None:
        sock = _connected(ticket)
        self._address = str(sock.getsockname()[0])
        self._channel = Channel(sock)
        try:
            self.name = self._channel.request(RequestMembership(name), MembershipGranted, _TIMEOUT).name
        except OSError:
            self._channel.close()
            raise LaunchError(
                f"Joining the notebook at {ticket.endpoint} as {name!r} was requested, and it has closed the connection: it waits no "
                "more, has another release of accelerate_nb, or takes no such name. Launch again there, with the same release, or pass "
                "another --name."
            ) from None
        except BaseException:
            self._channel.close()
            raise

    def serve(self) -> bool:
        """Serve in the main thread; whether the notebook has ended it, rather than a signal of this machine."""
        server = AgentServer(self._channel, NodeNetwork(self._address))
        received: list[int] = []

        def end(number: int, _: FrameType | None) -> None:
            received.append(number)
            server.end()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, end)
        with closing(self._channel):
            serve_warm(server)
        return not received


def _connected(ticket: JoinTicket) -> socket.socket:
    """A connection over which both ends have proved the token."""
    try:
        sock = socket.create_connection((ticket.host, ticket.port), _TIMEOUT)
    except OSError as error:
        raise LaunchError(
            f"Joining the notebook at {ticket.endpoint} was requested, and nothing can be reached there: {error.strerror or error}. A notebook "
            "listens only while a launch waits for machines: launch again there, or let its firewall pass that port."
        ) from None
    try:
        prove_token(sock, ticket.key, _TIMEOUT)
        probe_connection(sock)
    except (ProtocolError, OSError) as error:
        sock.close()
        raise LaunchError(
            f"Joining the notebook at {ticket.endpoint} was requested, and this machine was not let in: {error}. Copy the newest line that "
            "the notebook has printed."
        ) from None
    return sock
