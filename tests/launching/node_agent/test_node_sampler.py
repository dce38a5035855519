"""The load of a node is sent by a thread, which nobody waits for without a limit."""

from __future__ import annotations

import threading

import pytest

from accelerate_nb.events.model import HostSample
from accelerate_nb.launching.node_agent.node_sampler import NodeSampler
from accelerate_nb.transport.protocol.agent_messages import NodeLoad


@pytest.mark.timeout(20)
def test_a_reader_that_does_not_read_holds_up_no_close() -> None:
    reads, is_sending = threading.Event(), threading.Event()
    sent: list[NodeLoad] = []

    def send(load: NodeLoad) -> None:
        sent.append(load)
        is_sending.set()
        reads.wait()

    sampler = NodeSampler(send, 3, first=0.0)
    assert is_sending.wait(10)
    sampler.close(timeout=0.1)
    reads.set()
    (load,) = sent
    assert isinstance(load.sample, HostSample)
    assert load.sample.node == 3
