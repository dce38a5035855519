"""Machines join at a port that strangers reach, too: only who proves the token is listened to, and nobody disturbs the others."""

import hmac
import os
import pickle
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb.cli.commands.join import given_ticket
from accelerate_nb.cli.main import main
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.launching.node_agent.agent_process import JoinTicket, new_token
from accelerate_nb.launching.nodes.joined_machines import JoiningMachine, MachineListener
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.handshake import prove_token
from accelerate_nb.transport.messages import KillGroup, RequestMembership
from tests.processes import FD_SETSIZE, many_descriptors

pytestmark = pytest.mark.timeout(30)
GREETING = b"\x93ANBJ\x01" + bytes(32)


@pytest.fixture
def listener() -> Iterator[MachineListener]:
    with closing(MachineListener(JoinTicket(new_token(), "127.0.0.1", 0), timeout=1000.0)) as made:
        yield made


def address(listener: MachineListener) -> tuple[str, int]:
    return listener.ticket.host, listener.ticket.port


def until(listener: MachineListener, is_over: Any) -> list[JoiningMachine]:
    """Have the listener go on until something is so; returns who has joined."""
    deadline, found = time.monotonic() + 15, []
    while not is_over(found):
        assert time.monotonic() < deadline
        found += listener.wait(0.05)
    return found


def sent(listener: MachineListener, *parts: bytes) -> socket.socket:
    """A stranger who sends something, and after each answer something more."""
    sock = socket.create_connection(address(listener), 5)
    sock.sendall(parts[0])
    for part in parts[1:]:
        _ = answer(listener, sock, 38)
        sock.sendall(part)
    return sock


def answer(listener: MachineListener, sock: socket.socket, size: int) -> bytes:
    """What the listener has sent."""
    sock.setblocking(False)
    data, deadline = b"", time.monotonic() + 15
    while len(data) < size:
        assert time.monotonic() < deadline
        assert not listener.wait(0.05)
        with suppress(BlockingIOError):
            data += sock.recv(size - len(data))
    sock.setblocking(True)
    return data


def proof(listener: MachineListener, greeted: bytes) -> bytes:
    """The proof of a connecting end, as the protocol has it."""
    return hmac.digest(listener.ticket.key, b"connecting" + GREETING + greeted[6:], "sha256")


def joins(listener: MachineListener, name: str) -> tuple[socket.socket, list[JoiningMachine]]:
    """A machine with the token joins."""
    sock = socket.create_connection(address(listener), 5)
    with ThreadPoolExecutor(1) as threads:
        proved = threads.submit(prove_token, sock, listener.ticket.key, 10.0)
        early = until(listener, lambda _: proved.done())
        proved.result()
    Channel(sock).send(RequestMembership(name))
    return sock, until(listener, lambda found: [*early, *found])


def test_only_who_has_the_token_joins_whatever_strangers_send_meanwhile(
    listener: MachineListener, tmp_path: Path
) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was run"),)

    silent = socket.create_connection(address(listener), 5)
    slow = sent(listener, GREETING[:10])
    for raw in (b"GET / HTTP/1.1\r\n\r\n", pickle.dumps(Code()), b"\x93ANB" + pickle.dumps(Code()), b"x" * (1 << 20)):
        refused = listener.refused
        with closing(socket.create_connection(address(listener), 5)) as stranger:
            stranger.settimeout(0.2)
            # it is closed at its first bytes
            with suppress(OSError):
                stranger.sendall(raw)
            until(listener, lambda _, before=refused: listener.refused == before + 1)
    sock, (machine,) = joins(listener, "box")
    assert machine.name == "box"
    assert listener.refused == 4
    assert not (tmp_path / "was run").exists()
    # nothing was sent to who said nothing, and those two may still prove the token
    for stranger in (silent, slow):
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(1)
        stranger.close()
    sock.close()


def test_a_machine_joins_a_process_that_holds_many_files(listener: MachineListener) -> None:
    with many_descriptors() as moved:
        listener._socket = moved(listener._socket)
        assert listener._socket.fileno() >= FD_SETSIZE
        sock, (machine,) = joins(listener, "far")
        with sock, closing(machine.channel):
            assert machine.name == "far"


def test_more_than_a_proof_is_no_proof(listener: MachineListener) -> None:
    with sent(listener, GREETING, b"x" * (1 << 16)):
        until(listener, lambda _: listener.refused == 1)


def test_the_first_message_is_a_request_with_a_name_that_can_be_printed(listener: MachineListener) -> None:
    for count, message in enumerate((KillGroup(), RequestMembership("a\x1b[2Jb"), RequestMembership("a" * 65)), 1):
        sock = socket.create_connection(address(listener), 5)
        sock.sendall(GREETING)
        sock.sendall(proof(listener, answer(listener, sock, 38)))
        _ = answer(listener, sock, 32)
        Channel(sock).send(message)
        until(listener, lambda _, count=count: listener.refused == count)
        sock.close()


def test_the_time_to_prove_the_token_is_limited() -> None:
    with closing(MachineListener(JoinTicket(new_token(), "127.0.0.1", 0), timeout=0.05)) as listener:
        with socket.create_connection(address(listener), 5) as silent, sent(listener, GREETING[:10]) as slow:
            until(listener, lambda _: listener.refused == 2)
            assert silent.recv(1) == b""
            assert slow.recv(1) == b""


def test_a_ticket_comes_from_the_line_a_file_or_the_environment(tmp_path: Path) -> None:
    ticket = JoinTicket(new_token(), "fe80::1", 4000)
    (tmp_path / "ticket").write_text(f"{ticket}\n")
    assert str(ticket) == f"{ticket.token}@[fe80::1]:4000"
    assert ticket.token not in repr(ticket)
    assert JoinTicket.parse(given_ticket(str(ticket), {})) == ticket
    assert JoinTicket.parse(given_ticket(f"@{tmp_path}/ticket", {})) == ticket
    assert JoinTicket.parse(given_ticket(None, {"ACCELERATE_NB_JOIN": str(ticket)})) == ticket
    for text in (
        None,
        "",
        "@/missing/file",
        f"{ticket.token}@host",
        f"{ticket.token[1:]}@host:1",
        "a@b:1",
        f"{ticket}9999",
    ):
        with pytest.raises(ConfigurationError) as caught:
            JoinTicket.parse(given_ticket(text, {}))
        assert ticket.token[1:] not in str(caught.value)


def test_the_command_reports_why_it_can_not_join(listener: MachineListener, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "nonsense"]) == 2
    assert "Copy the whole line" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    assert main(["join", f"{new_token()}@127.0.0.1:{port}"]) == 1
    assert "nothing can be reached there: Connection refused" in capsys.readouterr().err


def test_a_listener_proves_nothing_to_who_has_another_token(listener: MachineListener) -> None:
    with sent(listener, GREETING, bytes(32)) as stranger:
        until(listener, lambda _: listener.refused == 1)
        stranger.settimeout(5)
        assert stranger.recv(4096) == b""
