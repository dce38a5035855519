"""The proof, at both ends of a new connection, that the other one knows the same token, which itself never crosses it."""

import hashlib
import hmac
import secrets
import socket
import time
from typing import Literal

from accelerate_nb.errors import ProtocolError

# Each end greets with these bytes, of which the last is the version of the handshake, and a nonce of its own.
_GREETING = b"\x93ANBJ\x01"
_NONCE_SIZE = 32
_GREETING_SIZE = len(_GREETING) + _NONCE_SIZE
_PROOF_SIZE = hashlib.sha256().digest_size

_End = Literal["connecting", "listening"]


class ListenerHandshake:
    """The listening end's half, which is fed with bytes as they come, and never with more than `missing`."""

    # The connecting end greets, is greeted, proves that it knows the token, and gets the proof that this end does. A proof is the
    # HMAC-SHA256 of the end that made it and of both nonces: it is of no use on another connection, or to the other end.

    def __init__(self, token: bytes) -> None:
        self._token, self._nonce = token, secrets.token_bytes(_NONCE_SIZE)
        self._data = bytearray()
        self._other_nonce: bytes | None = None
        self.missing = _GREETING_SIZE

    def feed(self, data: bytes) -> bytes:
        """Take in what has come, and return what is to be sent; raises `ProtocolError` ("malformed", or "token" for another one)."""
        self._data += data
        self.missing -= len(data)
        if self._other_nonce is None and not _GREETING.startswith(self._data[: len(_GREETING)]):
            raise ProtocolError("malformed", "a connection began with bytes that are no greeting")
        if self.missing:
            return b""
        received = bytes(self._data)
        self._data.clear()
        if self._other_nonce is None:
            self._other_nonce, self.missing = received[len(_GREETING) :], _PROOF_SIZE
            return _GREETING + self._nonce
        if not hmac.compare_digest(received, _proof(self._token, "connecting", self._other_nonce, self._nonce)):
            raise ProtocolError("token", "a connection has another token")
        return _proof(self._token, "listening", self._other_nonce, self._nonce)


def prove_token(sock: socket.socket, token: bytes, timeout: float) -> None:
    """Do the connecting end's half in so many seconds; raises `ProtocolError` ("malformed", "token"), `OSError`, `TimeoutError`."""
    deadline, nonce = time.monotonic() + timeout, secrets.token_bytes(_NONCE_SIZE)
    sock.settimeout(timeout)
    sock.sendall(_GREETING + nonce)
    greeting = _receive(sock, _GREETING_SIZE, deadline)
    if len(greeting) < _GREETING_SIZE or not greeting.startswith(_GREETING):
        raise ProtocolError("malformed", "what listens there does not answer as a notebook that waits for machines")
    other_nonce = greeting[len(_GREETING) :]
    sock.sendall(_proof(token, "connecting", nonce, other_nonce))
    proof = _receive(sock, _PROOF_SIZE, deadline)
    if not hmac.compare_digest(proof, _proof(token, "listening", nonce, other_nonce)):
        raise ProtocolError("token", "the notebook there has another token")
    sock.settimeout(None)


def _proof(token: bytes, end: _End, connecting_nonce: bytes, listening_nonce: bytes) -> bytes:
    # all parts but the name of the end have a fixed length, and no name is the beginning of the other
    return hmac.digest(token, end.encode() + _GREETING + connecting_nonce + listening_nonce, "sha256")


def _receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    """So many bytes, or fewer where the other end has closed."""
    data = b""
    while len(data) < size:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("no whole answer came in time")
        sock.settimeout(left)
        try:
            part = sock.recv(size - len(data))
        except ConnectionError:
            break
        if not part:
            break
        data += part
    return data
