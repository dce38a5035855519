"""The connection to the agent of one node, which one run at a time uses."""

from __future__ import annotations

import os
import subprocess
import time

from accelerate_nb.errors import LaunchError
from accelerate_nb.events.terminal_lines import plain
from accelerate_nb.launching.node_agent.node_facts import clock_offset
from accelerate_nb.launching.nodes.node_engine import NodeEngine
from accelerate_nb.transport.channel import Reply
from accelerate_nb.transport.messages import (
    Message,
    NodeFacts,
    QueryNode,
)

# How long a new agent may take until it replies for the first time, and one that has replied before, in seconds.
_START_TIMEOUT = 60.0
REPLY_TIMEOUT = 8.0
# Facts that are so old need not be asked for again.
_FRESH = 2.0
_LAST_OUTPUT = 2000
# How long agents may take until they have ended, in seconds.
END_TIMEOUT = 2.0


class NodeConnection:
    """
    An agent that `engine` placed on a node; `open` waits until it has sent the facts of its node.

    >>> connection = NodeConnection(SshNodes(("ssh",), sys.executable), "a")
    >>> connection.open()
    >>> connection.facts.torch
    '2.13.0'
    """

    def __init__(self, engine: NodeEngine, name: str) -> None:
        self.engine, self.name = engine, name
        self._placed = engine.place(name)
        self.channel = self._placed.channel
        self._facts: NodeFacts | None = None
        self._queried_at = float("-inf")
        # by how many seconds its clock is ahead of this machine's; 0 where that is less than what can be measured
        self.clock_offset = 0.0
        # the addresses of the nodes to which it can connect
        self.reached: frozenset[str] = frozenset()
        # a reply that did not come in time may come yet, and be taken for another one's
        self.is_usable = True

    @property
    def facts(self) -> NodeFacts:
        """The facts of its node."""
        assert self._facts is not None, "open() comes first"
        return self._facts

    def open(self) -> None:
        """Wait for the agent; raises `LaunchError` with what it, or the way to it, wrote."""
        self._query(_START_TIMEOUT)
        # the first reply came after a start of unknown length
        self._query(REPLY_TIMEOUT)

    def refresh(self) -> None:
        """Check that an agent that was there before still is; raises `LaunchError`."""
        if time.monotonic() - self._queried_at > _FRESH:
            self._query(REPLY_TIMEOUT)

    def request(self, message: Message, reply_class: type[Reply], timeout: float) -> Reply:
        """Send a message to an agent that has no workers, and wait for its reply; raises `LaunchError` where none comes."""
        try:
            return self.channel.request(message, reply_class, timeout)
        except TimeoutError:
            reason = f"nothing came from it within {timeout:g} s"
        except OSError:
            reason = self._reason()
        self.is_usable = False
        raise LaunchError(
            f"Workers on {self.name} were requested, and its agent can't be reached: {reason}. {self.engine.advice(self.name)}."
        )

    def request_end(self) -> None:
        """Have the agent end; `close` waits until it has."""
        self.channel.shutdown()

    def close(self, timeout: float = END_TIMEOUT) -> None:
        """End the agent, which may take so many seconds for it: one that is lost gets 0."""
        self.channel.shutdown()
        self.channel.close()
        if (process := self._placed.process) is not None:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._placed.output is not None:
            os.close(self._placed.output)

    def _query(self, timeout: float) -> None:
        sent = time.time()
        self._facts = self.request(QueryNode(), NodeFacts, timeout)
        received = time.time()
        self._queried_at = time.monotonic()
        self.clock_offset = clock_offset(self._facts, sent, received)

    def _reason(self) -> str:
        """Why nothing more comes."""
        if (error := self.channel.error) is not None:
            return (
                f"{error}: another release of accelerate_nb is installed there"
                if error.refusal == "version"
                else str(error)
            )
        process, output = self._placed.process, self._placed.output
        try:
            code = None if process is None else process.wait(2.0)
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            return "it has closed its connection"
        found = b"" if output is None else os.pread(output, 1 << 20, 0)
        written = plain(found.decode(errors="replace")).strip()[-_LAST_OUTPUT:]
        return f"exit code {code}" + (f", and these last words:\n{written}\n" if written else "")
