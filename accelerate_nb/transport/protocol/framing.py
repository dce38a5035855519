"""The frames of messages: a head with the version of the messages and the length, then the message."""

from __future__ import annotations

import struct
from collections import Counter

from accelerate_nb.errors import ProtocolError
from accelerate_nb.transport.protocol.message import Message
from accelerate_nb.transport.protocol.message_codec import decode, encode

# The version of the messages: to be raised when a message changes in what it means or holds. The head itself stays.
VERSION = 7
# The first byte is no ASCII, which messages are made of: after anything refused, the next head can be found.
_MAGIC = b"\x93ANB"
# The magic, the version, how many descriptors come with the message, and its length.
_HEAD = struct.Struct("<4sHHI")
# A message that is longer is refused, by its sender and by its receiver.
SIZE_LIMIT = 64 << 20
# Linux passes at most this many descriptors at once (SCM_MAX_FD).
MOST_DESCRIPTORS = 253


def frame(message: Message, descriptors: int = 0, size_limit: int = SIZE_LIMIT) -> bytes:
    """A message with its head; raises `ProtocolError` where it is too long, or can't have so many descriptors."""
    body = encode(message)
    if len(body) > size_limit:
        raise ProtocolError(
            "oversized", f"a message of {len(body)} bytes was to be sent, and {size_limit} is the limit"
        )
    if message.carries not in {None, descriptors} or descriptors > _HEAD.size * MOST_DESCRIPTORS:
        raise ProtocolError("descriptors", f"{type(message).__name__} was to be sent with {descriptors} descriptors")
    return _HEAD.pack(_MAGIC, VERSION, descriptors, len(body)) + body


def message_of(data: bytes) -> Message:
    """The one message in `data`, which `frame` made; raises `ProtocolError` where there is another content."""
    reader = FrameReader()
    reader.feed(data)
    received = reader.next()
    if received is None or not reader.is_empty:
        raise reader.last_error or ProtocolError("malformed", f"{len(data)} bytes are not one whole message")
    return received[0]


class FrameReader:
    """
    Messages out of bytes as they come. Whatever is no message is refused, counted by its reason, and passed over.

    >>> reader = FrameReader()
    >>> reader.feed(frame(KillGroup())[:-1])
    >>> reader.next()
    >>> reader.feed(b"}")
    >>> reader.next()
    (KillGroup(), 0)
    """

    def __init__(self, size_limit: int = SIZE_LIMIT) -> None:
        self.refused: Counter[str] = Counter()
        self.last_error: ProtocolError | None = None
        # descriptors that came with refused messages
        self.refused_descriptors = 0
        self._size_limit = size_limit
        self._data = bytearray()
        # no other head begins before it, within the message at the beginning
        self._searched = 0
        # whether what comes up to the next head is refused already
        self._is_skipping = False

    @property
    def is_empty(self) -> bool:
        """Whether no message has begun that has not ended."""
        return not self._data

    def feed(self, data: bytes) -> None:
        """Take in what has come."""
        self._data += data

    def next(self) -> tuple[Message, int] | None:
        """The next whole message, and how many descriptors its head counts; `None` where more has to come first."""
        while self._find_head() and len(self._data) >= _HEAD.size:
            _, version, descriptors, length = _HEAD.unpack_from(self._data)
            end = _HEAD.size + length
            following = self._following(end)
            try:
                _check_head(version, length, self._size_limit, is_whole=following < 0)
                if len(self._data) < end:
                    return None
                message = _opened(bytes(self._data[_HEAD.size : end]), descriptors)
            except ProtocolError as error:
                self.refuse(error)
                self.refused_descriptors += descriptors
                self._pass_over(end if following < 0 else following)
            else:
                self._drop(end)
                return message, descriptors
        return None

    def take(self, count: int) -> bytes:
        """At most so many bytes that came after the last message, and are none."""
        data = bytes(self._data[:count])
        self._drop(len(data))
        return data

    def refuse(self, error: ProtocolError) -> None:
        """Count a refused message."""
        self.refused[error.refusal] += 1
        self.last_error = error

    def _following(self, end: int) -> int:
        """The place of another head before `end`, which no message has in it; -1 where there is none."""
        start, self._searched = max(self._searched, len(_MAGIC)), max(len(self._data) - len(_MAGIC) + 1, 0)
        return self._data.find(_MAGIC, start, end + len(_MAGIC) - 1)

    def _pass_over(self, end: int) -> None:
        """Drop a refused message, of which a part may still have to come."""
        self._is_skipping = len(self._data) < end
        # the last bytes may be the beginning of the next one
        self._drop(min(end, len(self._data) - len(_MAGIC) + 1) if self._is_skipping else end)

    def _find_head(self) -> bool:
        """Drop what stands before the next head; whether there may be one."""
        at = self._data.find(_MAGIC)
        if at < 0:
            # the last bytes may be the beginning of one
            kept = next(size for size in range(len(_MAGIC) - 1, -1, -1) if self._data.endswith(_MAGIC[:size]))
            at = len(self._data) - kept
        if at and not self._is_skipping:
            self.refuse(ProtocolError("malformed", "bytes that are no message have come"))
            self._is_skipping = True
        if at:
            self._drop(at)
        self._is_skipping &= not (found := self._data.startswith(_MAGIC))
        return found

    def _drop(self, count: int) -> None:
        del self._data[:count]
        self._searched = 0


def _check_head(version: int, length: int, size_limit: int, *, is_whole: bool) -> None:
    if version != VERSION:
        text = f"a message has version {version} of the protocol, and {VERSION} is understood here"
        raise ProtocolError("version", text)
    if length > size_limit:
        raise ProtocolError("oversized", f"a message has {length} bytes, and {size_limit} is the limit")
    if not is_whole:
        raise ProtocolError("malformed", "a message lacks its end")


def _opened(body: bytes, descriptors: int) -> Message:
    message = decode(body)
    if message.carries not in {None, descriptors}:
        raise ProtocolError("descriptors", f"{type(message).__name__} came with {descriptors} descriptors")
    return message
