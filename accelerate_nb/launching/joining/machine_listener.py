"""The socket at which machines join a notebook: who comes proves the token before anything that it sends is read as a message."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from accelerate_nb.errors import LaunchError, ProtocolError
from accelerate_nb.launching.joining.join_ticket import JoinTicket
from accelerate_nb.launching.node_agent.node_network import probe_connection
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.handshake import ListenerHandshake
from accelerate_nb.transport.messages import RequestMembership

# So many connections with another token, and the listener closes: somebody guesses, or the line was copied wrong.
MOST_WRONG_TOKENS = 5
_LONGEST_NAME = 64
# Connections that have sent nothing yet: so many may wait, each for so many seconds. A port that others reach meets strangers.
_MOST_PENDING = 128
PENDING_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class JoiningMachine:
    """A machine that has proved the token: the name that it wants, and the channel to its agent."""

    name: str
    channel: Channel


class _Newcomer:
    """A connection on its way to a `JoiningMachine`."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        self._socket = sock
        self._handshake = ListenerHandshake(token)
        self._channel: Channel | None = None

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def read(self) -> JoiningMachine | None:
        """Take what has come, without waiting; raises `ProtocolError` or `OSError` where it will be no machine."""
        if self._channel is None:
            data = self._socket.recv(self._handshake.missing, socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionError("it has closed its connection")
            # some bytes, which the system takes on a connection that has sent nothing else
            self._socket.send(self._handshake.feed(data))
            if not self._handshake.missing:
                self._channel = Channel(self._socket)
            return None
        received = next(self._channel.receive_ready(), None)
        match received and received.message:
            case None if not self._channel.is_ended:
                return None
            case RequestMembership(name) if name and name.isprintable() and len(name) <= _LONGEST_NAME:
                return JoiningMachine(name, self._channel)
        raise ProtocolError("unexpected", "a connection that has the token is no machine that joins")


class MachineListener:
    """
    Listens at one address and port, until it is closed.

    >>> with MachineListener(JoinTicket(new_token(), "10.0.0.1", 0)) as listener:
    ...     while not (machines := listener.wait(1.0)):
    ...         print(listener.ticket.endpoint)
    """

    def __init__(self, ticket: JoinTicket, timeout: float = PENDING_TIMEOUT) -> None:
        family = socket.AF_INET6 if ":" in ticket.host else socket.AF_INET
        try:
            self._socket = socket.create_server((ticket.host, ticket.port), family=family, backlog=128)
        except OSError as error:
            raise LaunchError(
                f"join_address={ticket.endpoint!r} was requested, and this process can't listen there: {error.strerror or error}. Pass one "
                "address of this machine, as the other machines reach it, and a port that is free, or none."
            ) from error
        # one that has gone before it was accepted
        self._socket.setblocking(False)
        self.ticket = JoinTicket(ticket.token, ticket.host, int(self._socket.getsockname()[1]))
        self._newcomers = PendingConnections(lambda sock: _Newcomer(sock, self.ticket.key), timeout)
        self._wrong_tokens = 0

    def __enter__(self) -> MachineListener:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def refused(self) -> int:
        """The number of connections that were refused."""
        return self._newcomers.refused

    def close(self) -> None:
        """Listen no more, and close the connections of those that have not joined yet."""
        self._socket.close()
        self._newcomers.close()

    def wait(self, timeout: float, others: Sequence[Channel] = ()) -> list[JoiningMachine]:
        """
        The machines that have joined, once something has come, also to the other channels, which stay unread.

        Raises `LaunchError` where too many connections had another token; the listener is closed then.
        """
        watched: list[socket.socket | Channel] = [self._socket, *self._newcomers.states, *others]
        readable = select.select(watched, (), (), timeout)[0]
        if self._socket in readable:
            with suppress(BlockingIOError, ConnectionError):
                self._newcomers.accept(self._socket)
        found = [
            machine
            for sock in [sock for sock in self._newcomers.states if sock in readable]
            if (machine := self._read(sock)) is not None
        ]
        self._newcomers.refuse_expired()
        return found

    def _read(self, sock: socket.socket) -> JoiningMachine | None:
        try:
            machine = self._newcomers.states[sock].read()
        except BlockingIOError:
            return None
        except ProtocolError as error:
            self._newcomers.refuse(sock)
            self._wrong_tokens += error.refusal == "token"
            if self._wrong_tokens >= MOST_WRONG_TOKENS:
                self.close()
                raise LaunchError(
                    f"Machines were waited for at {self.ticket.endpoint}, and {self._wrong_tokens} connections had another token: the line was "
                    "copied wrong, or somebody guesses. The port was closed; launch again for a line with a new token."
                ) from None
            return None
        except OSError:
            self._newcomers.refuse(sock)
            return None
        if machine is not None:
            self._newcomers.take(sock)
        return machine


class PendingConnections:
    """
    New connections, each with what `begin` makes of it, until they are taken or refused; `refused` counts the latter.

    >>> pending = PendingConnections(Channel)
    >>> pending.accept(listener)
    >>> pending.refuse_expired()
    """

    def __init__(self, begin: Callable[[socket.socket], _Newcomer], timeout: float = PENDING_TIMEOUT) -> None:
        self.states: dict[socket.socket, _Newcomer] = {}
        self.refused = 0
        self._begin, self._timeout = begin, timeout
        self._since: dict[socket.socket, float] = {}

    def accept(self, listener: socket.socket) -> None:
        """Take in one connection; one too many is closed."""
        sock = listener.accept()[0]
        if len(self.states) >= _MOST_PENDING:
            sock.close()
            return
        probe_connection(sock)
        self.states[sock], self._since[sock] = self._begin(sock), time.monotonic()

    def take(self, sock: socket.socket) -> _Newcomer:
        """A connection that has shown whose it is, which is the caller's from now on."""
        del self._since[sock]
        return self.states.pop(sock)

    def refuse(self, sock: socket.socket) -> None:
        """Count a connection that is none of those that are waited for, and close it."""
        self.refused += 1
        self.take(sock).close()

    def refuse_expired(self) -> None:
        """Refuse those whose time is over."""
        now = time.monotonic()
        for sock in [sock for sock, since in self._since.items() if now - since > self._timeout]:
            self.refuse(sock)

    def close(self) -> None:
        """Close all of them."""
        for sock in list(self.states):
            self.take(sock).close()
