"""The load of a node is sent by a thread, which nobody waits for without a limit."""

from __future__ import annotations

import os
import threading

import pytest

from accelerate_nb.events.model import DeviceSample, HostSample
from accelerate_nb.launching.node_agent.agent_process import NodeSampler
from accelerate_nb.transport.messages import NodeLoad
from accelerate_nb.transport.worker_spec import MasterAddress, RankInfo, WorkerSpec, current_environment


@pytest.mark.timeout(20)
def test_a_reader_that_does_not_read_holds_up_no_close() -> None:
    reads, is_sending = threading.Event(), threading.Event()
    sent: list[NodeLoad] = []

    def send(load: NodeLoad) -> None:
        sent.append(load)
        is_sending.set()
        reads.wait()

    rank_info = RankInfo(7, 8, 0, 1, MasterAddress("", 0), "run", node_rank=3)
    environment = current_environment({"ACCELERATE_USE_CPU": "true"}, None)
    sampler = NodeSampler(send, [WorkerSpec(rank_info, environment)], lambda: {7: os.getpid()}, first=0.0)
    assert is_sending.wait(10)
    sampler.close(timeout=0.1)
    reads.set()
    (load,) = sent
    assert isinstance(load.sample, HostSample)
    assert load.sample.node == 3
    (device,) = load.devices
    assert isinstance(device, DeviceSample)
    assert (device.rank, device.device, device.memory_total) == (7, "cpu", load.sample.memory[1])
    assert device.memory_used
