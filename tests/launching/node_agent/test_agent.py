"""An agent reports all that its workers do, in an order that each rank's numbers show, wherever the worker group is."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb.events.model import LogLine, StateChange
from accelerate_nb.events.run_folder import RunRecorder, new_folder
from accelerate_nb.launching.engines.fork import ForkEngine
from accelerate_nb.launching.node_agent.agent import NodeAgent
from accelerate_nb.launching.planning.plan import LaunchPlan, rendezvous_socket
from accelerate_nb.launching.worker_group import WorkerGroup
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import Message, RankEvent, RankExited, RankOutput
from accelerate_nb.transport.outcome import Raised, Returned, read_outcome
from accelerate_nb.transport.payload import FunctionCall, inherit
from accelerate_nb.transport.rank_info import MasterAddress
from accelerate_nb.transport.worker_spec import current_environment

TIMEOUT = 60.0


def prints_and_returns() -> int:
    print("out", os.environ["RANK"])
    print("err", file=sys.stderr)
    return int(os.environ["RANK"]) + 1


def fails_on_one_rank() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("a")
    while True:
        time.sleep(0.05)


class RemoteGroup:
    """A worker group that knows its agent, which is in another thread, by the messages of a channel alone."""

    def __init__(self, function: Callable[[], Any], folder: Path, size: int = 2) -> None:
        self.group = WorkerGroup(size, stop_grace_period=2.0)
        self.reports: list[Message] = []
        self.outcomes: list[Returned | Raised | None] = []
        self.record = RunRecorder(new_folder(folder, "agent"))
        payload = inherit(FunctionCall(function))
        self._plan = LaunchPlan(payload, size, current_environment({}, None), run="agent")
        self._near, self._far = (Channel(end) for end in socket.socketpair())

    def run(self) -> None:
        """Run the workers to their end."""
        thread = threading.Thread(target=self._serve)
        thread.start()
        deadline = time.monotonic() + TIMEOUT
        while self.group.phase != "over":
            assert time.monotonic() < deadline
            for received in self._near.receive_ready():
                self.reports.append(received.message)
                self._send(self.group.take(received.message, time.monotonic()))
            self._send(self.group.advance(time.monotonic()))
            time.sleep(0.01)
        self._near.shutdown()
        thread.join(TIMEOUT)
        self._near.close()

    def _send(self, decisions: Any) -> None:
        for decision in decisions:
            if isinstance(decision, Message):
                self._near.send(decision)

    def _serve(self) -> None:
        plan = self._plan
        with self._far, NodeAgent(plan.size, ForkEngine(plan.payload), self.record, self._report) as agent:
            agent.open()
            with rendezvous_socket(0) as store:
                agent.start(plan.specs(MasterAddress(*store.getsockname()), 0), plan.payload, store.fileno())
            while not self._far.is_ended:
                for received in self._far.receive_ready():
                    agent.carry_out(received.message)
                agent.read_output()
                agent.wait(0.02)
            agent.drain()
            self.outcomes = [read_outcome(agent.outcome_file(rank)) for rank in range(plan.size)]
        self.record.close()

    def _report(self, message: Message) -> None:
        self._far.try_send(message)

    def numbers(self, rank: int) -> list[int]:
        return [item.number for item in self.reports if getattr(item, "rank", -1) == rank]


@pytest.mark.timeout(2 * TIMEOUT)
def test_what_ranks_write_send_and_end_with_arrives_in_order(tmp_path: Path) -> None:
    remote = RemoteGroup(prints_and_returns, tmp_path)
    remote.run()
    for rank in range(2):
        assert remote.numbers(rank) == list(range(len(remote.numbers(rank))))
        states = [
            report.event.state
            for report in remote.reports
            if isinstance(report, RankEvent) and isinstance(report.event, StateChange) and report.rank == rank
        ]
        assert states == ["starting", "running", "finished"]
        lines = [line for report in remote.reports if isinstance(report, RankOutput) for line in report.lines]
        written = {(line.stream, line.text) for line in lines if isinstance(line, LogLine) and line.rank == rank}
        assert written >= {("stdout", f"out {rank}")}
        assert remote.outcomes[rank] == Returned(rank + 1, remote.outcomes[rank].modules)
        log = (remote.record.folder / f"rank_{rank}.log").read_text()
        assert sorted(log.splitlines()) == ["err", f"out {rank}"]
    assert remote.group.exit_codes == {0: 0, 1: 0}
    assert (remote.group.repeated, remote.group.missing) == (0, 0)


@pytest.mark.timeout(2 * TIMEOUT)
def test_a_group_elsewhere_ends_the_ranks_of_which_one_has_failed(tmp_path: Path) -> None:
    remote = RemoteGroup(fails_on_one_rank, tmp_path)
    remote.run()
    assert remote.group.states == {0: "stopped", 1: "failed"}
    assert {report.rank for report in remote.reports if isinstance(report, RankExited)} == {0, 1}
    first, second = remote.outcomes
    assert isinstance(first, Raised)
    assert isinstance(second, Raised)
    assert (first.failure.ended_by_us, second.failure.type) == (True, "KeyError")
