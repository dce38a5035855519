"""Two ends prove a token to each other, and nothing that was sent on one connection is of use on another."""

import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from accelerate_nb.errors import ProtocolError
from accelerate_nb.transport.handshake import ListenerHandshake, prove_token

pytestmark = pytest.mark.timeout(20)
TOKEN = secrets.token_bytes(16)


def recorded(listening: Callable[[socket.socket], None], token: bytes = TOKEN) -> None:
    """A connecting end with a token beside a listening one."""
    near, far = socket.socketpair()
    with near, far, ThreadPoolExecutor(1) as threads:
        other = threads.submit(listening, far)
        try:
            prove_token(near, token, 5.0)
        finally:
            near.shutdown(socket.SHUT_RDWR)
            other.result()


def served(sock: socket.socket, sent: list[bytes] | None = None, received: list[bytes] | None = None) -> None:
    handshake = ListenerHandshake(TOKEN)
    try:
        while handshake.missing and (data := sock.recv(handshake.missing)):
            (received if received is not None else []).append(data)
            reply = handshake.feed(data)
            (sent if sent is not None else []).append(reply)
            sock.sendall(reply)
    except ProtocolError:
        sock.shutdown(socket.SHUT_RDWR)


def test_both_ends_prove_the_token_which_crosses_in_no_form_and_the_proof_is_refused_on_another_connection() -> None:
    sent: list[bytes] = []
    received: list[bytes] = []
    recorded(lambda sock: served(sock, sent, received))
    crossed = b"".join(sent + received)
    assert len(crossed) == 2 * (38 + 32)
    assert TOKEN not in crossed
    assert TOKEN.hex().encode() not in crossed
    greeting, proof = received
    handshake = ListenerHandshake(TOKEN)
    assert handshake.feed(greeting)
    with pytest.raises(ProtocolError) as caught:
        handshake.feed(proof)
    assert caught.value.refusal == "token"


def test_bytes_may_come_one_by_one() -> None:
    sent, handshake = [], ListenerHandshake(TOKEN)
    for byte in b"\x93ANBJ\x01" + bytes(32):
        sent.append(handshake.feed(bytes([byte])))
    assert sent[:-1] == [b""] * 37
    assert len(sent[-1]) == 38


def mirrors(sock: socket.socket) -> None:
    """One that listens without the token, and sends back what the machine sends: the same nonce, the same proof."""
    while data := sock.recv(4096):
        sock.sendall(data)


def greets_and_closes(sock: socket.socket) -> None:
    sock.sendall(ListenerHandshake(TOKEN).feed(sock.recv(38)))
    sock.recv(32)
    sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("listening", "token"), [(served, secrets.token_bytes(16)), (mirrors, TOKEN), (greets_and_closes, TOKEN)]
)
def test_another_token_an_end_s_own_words_and_a_close_prove_nothing(listening: Callable, token: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        recorded(listening, token)
    assert caught.value.refusal == "token"


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n", b"\x80\x04\x95", b"\x93ANB\x00\x02", b"\x93ANBJ\x02"])
def test_what_is_no_greeting_is_refused_at_its_first_bytes(first: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        ListenerHandshake(TOKEN).feed(first)
    assert caught.value.refusal == "malformed"


def test_a_peer_that_sends_nothing_is_waited_for_as_long_as_was_set() -> None:
    near, far = socket.socketpair()
    with near, far, pytest.raises(TimeoutError):
        prove_token(near, TOKEN, 0.05)
