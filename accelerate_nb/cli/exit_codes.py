"""Exit codes of commands that a signal ended, as shells give them."""

from __future__ import annotations

# This, and the signal's number.
BY_SIGNAL = 128
INTERRUPTED = BY_SIGNAL + 2
# Of a program that wrote to a pipe without a reader.
BROKEN_PIPE = BY_SIGNAL + 13
