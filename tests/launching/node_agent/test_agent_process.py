"""Reports keep their order on their way to the worker group, and those that can wait go together."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from msgspec import structs

from accelerate_nb.events.event_types import DeviceSample, HostSample, LogLine, Progress, StateChange
from accelerate_nb.launching.node_agent.agent import AgentLoop
from accelerate_nb.launching.node_agent.agent_process import BETWEEN_SENDS, NodeSampler, ReportSender
from accelerate_nb.launching.node_agent.remote_agent import RemoteAgent
from accelerate_nb.transport import messages
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.memory_file import memory_file
from accelerate_nb.transport.worker_spec import NetworkAddress, RankInfo, WorkerSpec, current_environment


def output(number: int, text: str = "line") -> messages.RankOutput:
    return messages.RankOutput(0, number, text.encode(), (LogLine(0, "stdout", text, 1.0),))


def state(number: int) -> messages.RankEvent:
    return messages.RankEvent(0, number, StateChange(0, "running", 1.0))


class Ends:
    """A sender on a clock of its own, and what came of it."""

    def __init__(self) -> None:
        near, far = socket.socketpair()
        far.setblocking(False)
        self.near, self.far = Channel(near, 2000), Channel(far)
        self.now = 100.0
        self.sender = ReportSender(self.near, lambda: self.now)

    def tick(self) -> float:
        return self.sender.tick(self.now, 1.0)

    def came(self) -> list[list[messages.Message]]:
        received = [received.message for received in self.far.receive_ready()]
        return [
            list(message.reports) if isinstance(message, messages.RankReports) else [message] for message in received
        ]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    with closing(made.near), closing(made.far):
        yield made


def test_what_follows_within_a_tenth_of_a_second_goes_in_one_message(ends: Ends) -> None:
    assert ends.tick() == 1.0
    ends.sender.send(output(0))
    ends.sender.send(output(1))
    assert ends.came() == []
    assert ends.tick() == 1.0
    assert ends.came() == [[output(0), output(1)]]
    # nothing else waited before; from now on it does
    ends.now += BETWEEN_SENDS / 2
    ends.sender.send(output(2))
    assert ends.tick() == pytest.approx(BETWEEN_SENDS / 2)
    ends.sender.send(messages.RankEvent(0, 3, Progress(0, "steps", 1, 2, 1.0, 1.0)))
    ends.tick()
    assert ends.came() == []
    ends.now += BETWEEN_SENDS / 2
    ends.tick()
    assert [[report.number for report in reports] for reports in ends.came()] == [[2, 3]]


def test_a_state_goes_at_once_after_what_came_before_it(ends: Ends) -> None:
    ends.sender.send(output(0))
    ends.tick()
    ends.sender.send(output(1))
    ends.sender.send(state(2))
    assert ends.came() == [[output(0)], [output(1), state(2)]]
    ends.sender.flush()
    assert ends.came() == []


def test_a_line_stands_for_a_report_that_is_longer_than_a_message_may_be(ends: Ends) -> None:
    for report in (output(0), output(1, "x" * 2000), state(2)):
        ends.sender.send(report)
    (first,), (second,), (third,) = ends.came()
    assert (first, third) == (output(0), state(2))
    assert isinstance(second, messages.RankOutput)
    assert b"left out here: a message of 4" in second.raw


def test_a_report_with_a_file_goes_by_itself_after_what_came_before_it(ends: Ends) -> None:
    ends.sender.send(output(0))
    file = memory_file("outcome")
    ends.sender.send(messages.RankOutcome(0, 1), (file,))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    first, second = ends.far.receive_ready()
    assert first.message == output(0)
    assert (second.message, len(second.descriptors)) == (messages.RankOutcome(0, 1), 1)
    os.close(second.descriptors[0])


def test_much_output_does_not_wait() -> None:
    near, far = socket.socketpair()
    with closing(Channel(near)) as channel, closing(Channel(far)) as reader, ThreadPoolExecutor(1) as thread:
        sender, reading = ReportSender(channel, lambda: 100.0), thread.submit(reader.receive, 30.0)
        for number in range(3):
            sender.send(output(number, "x" * (1 << 20)))
        received = reading.result()
        assert received is not None
        assert [report.number for report in received.message.reports] == [0, 1, 2]  # type: ignore[attr-defined]


def test_reports_about_another_agent_s_ranks_and_what_is_no_report_are_refused() -> None:
    near, far = socket.socketpair()
    reports: list[messages.Message] = []
    with closing(AgentLoop()) as loop, closing(Channel(near)) as channel, closing(Channel(far)) as node:
        agent = RemoteAgent(channel, loop, lambda report, _: reports.append(report))
        spec = WorkerSpec(RankInfo(0, 1, 0, 1, NetworkAddress("", 0), "run"), current_environment({}, None))
        agent.start(messages.StartWorkers((spec,)), ())
        node.send(messages.RankExited(7, 0, 0, 1.0))
        node.send(messages.KillGroup())
        node.send(messages.RankReports((messages.RankOutput(7, 0, b"", ()), state(1))))
        node.shutdown()
        assert agent._closed.wait(30)
        agent.tick(0.0, 0.0)
        assert reports[0] == state(1)
        assert channel.refused == 3
        agent.close()


def test_in_a_large_world_a_rank_s_lines_are_one_report_and_go_less_often(ends: Ends) -> None:
    ends.sender.begin(world_size=1024)
    ends.sender.send(output(0))
    ends.tick()
    progress = messages.RankEvent(0, 3, Progress(0, "steps", 1, 2, 1.0, 1.0))
    gap = structs.replace(output(5), left_out=7)
    for report in (output(1, "a"), output(2, "b"), progress, output(4), gap):
        ends.sender.send(report)
    ends.now += 2 * BETWEEN_SENDS
    ends.tick()
    assert ends.came() == [[output(0)]]
    ends.now += BETWEEN_SENDS
    ends.tick()
    lines = (LogLine(0, "stdout", "a", 1.0), LogLine(0, "stdout", "b", 1.0))
    assert ends.came() == [[messages.RankOutput(0, 2, b"ab", lines), progress, output(4), gap]]


# The load of a node is sent by a thread, which nobody waits for without a limit.


@pytest.mark.timeout(20)
def test_a_reader_that_does_not_read_holds_up_no_close() -> None:
    reads, is_sending = threading.Event(), threading.Event()
    sent: list[messages.NodeLoad] = []

    def send(load: messages.NodeLoad) -> None:
        sent.append(load)
        is_sending.set()
        reads.wait()

    rank_info = RankInfo(7, 8, 0, 1, NetworkAddress("", 0), "run", node_rank=3)
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
