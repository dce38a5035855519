"""The ticket with which a machine joins a notebook: a secret token, and where the notebook listens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from accelerate_nb.errors import ConfigurationError

# The variable of the environment that holds a ticket, for those who want it in no list of processes.
VARIABLE = "ACCELERATE_NB_JOIN"
_TOKEN_SIZE = 16
_TEXT = re.compile(rf"(?P<token>[0-9a-f]{{{2 * _TOKEN_SIZE}}})@(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^@:\s]+)):(?P<port>\d+)")


def new_token() -> str:
    """A token of 128 random bits, as hexadecimal digits."""
    return secrets.token_hex(_TOKEN_SIZE)


@dataclass(frozen=True, slots=True)
class JoinTicket:
    """
    A token, which no `repr` shows, and the address and port at which a notebook waits for machines.

    >>> str(JoinTicket("5f" * 16, "10.0.0.1", 4000))
    '5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f@10.0.0.1:4000'
    """

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
    """
    The ticket of a command line: itself, `@FILE` for the content of a file, or nothing for that of the environment.

    Raises `ConfigurationError` where there is none.
    """
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
