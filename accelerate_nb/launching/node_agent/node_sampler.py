"""The load of a node, sent to the process that conducts its run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from accelerate_nb.devices.host_usage import HostGauge
from accelerate_nb.transport.protocol.agent_messages import NodeLoad

# When the load is sent after workers started, and how often from then on, in seconds.
_FIRST_SAMPLE, _BETWEEN_SAMPLES = 1.0, 5.0
# A sample that is being sent may wait for its reader, which has gone or doesn't read, in seconds.
_CLOSE_TIMEOUT = 2.0


class NodeSampler:
    """The thread that sends the load of node number `node` every few seconds, until it is closed."""

    def __init__(self, send: Callable[[NodeLoad], object], node: int, first: float = _FIRST_SAMPLE) -> None:
        self._send, self._node, self._first = send, node, first
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="accelerate_nb samples", daemon=True)
        self._thread.start()

    def close(self, timeout: float = _CLOSE_TIMEOUT) -> None:
        """End it; nothing more is sent from then on, but what is on its way for longer than `timeout` seconds."""
        self._over.set()
        self._thread.join(timeout)

    def _sample(self) -> None:
        gauge, wait = HostGauge(()), self._first
        while not self._over.wait(wait):
            self._send(NodeLoad(replace(gauge.sample(), node=self._node)))
            wait = _BETWEEN_SAMPLES
