"""A rank on another machine may write megabytes: its node keeps all of it, and what is sent of it is bounded and says what it lacks."""

import gzip
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from msgspec import structs

from accelerate_nb import Run, launch
from accelerate_nb.errors import WorkerError
from accelerate_nb.events.event_types import LogLine
from accelerate_nb.events.line_reader import LineAssembler
from accelerate_nb.launching.node_agent import node_logs
from accelerate_nb.launching.node_agent.node_logs import BURST_SIZE, BYTES_A_SECOND, HELD_SIZE, OutputPart, RankLog
from tests.launching.test_step_requests import steps_of_plain_torch
from tests.nodes.trainings import TWO_NODES
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)
LINES = 100_000
GAP = re.compile(r"… (\S+ \S+) left out here; whole log: node (.+), (/.+/rank_(\d+)\.log)")


def line_of(number: int) -> bytes:
    return b"line %06d of many, and some words to fill it\n" % number


class RankWriter:
    """A rank that writes into a log on a clock of its own, and what was sent of it."""

    def __init__(self, path: Path) -> None:
        self.now = 100.0
        self.log = RankLog(path, lambda: self.now)
        self.written = 0
        self.sent: list[OutputPart] = []
        self._assembler = LineAssembler()

    def write(self, data: bytes) -> None:
        self.written += len(data)
        raw, found = self._assembler.feed(data)
        lines = tuple(LogLine(0, "stdout", line.text, self.now, line.open, line.meaning) for line in found)
        self.take(self.log.take(raw, lines))

    def take(self, part: OutputPart | None) -> None:
        self.sent += [] if part is None else [part]

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.log.due())

    @property
    def raw(self) -> bytes:
        return b"".join(part.raw for part in self.sent)

    @property
    def texts(self) -> list[str]:
        return [line.text for part in self.sent for line in part.lines]

    @property
    def left_out(self) -> int:
        return sum(part.left_out for part in self.sent)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[RankWriter]:
    writer = RankWriter(tmp_path / "rank_0.log")
    yield writer
    writer.log.close()


def test_what_is_below_the_limit_is_sent_at_once_and_whole(rank: RankWriter) -> None:
    for _ in range(100):
        rank.write(b"x" * 6000 + b"\n")
        rank.now += 0.1
    rank.write(b"50 %\r60 %")
    assert len(rank.raw) == 100 * 6001
    assert rank.left_out == 0
    assert rank.texts[-1] == "60 %"
    assert not rank.log.held


def test_of_a_burst_the_beginning_and_the_end_are_sent_and_the_file_has_all(rank: RankWriter) -> None:
    data = b"".join(map(line_of, range(LINES)))
    for at in range(0, len(data), 1 << 18):
        rank.write(data[at : at + (1 << 18)])
    rank.take(rank.log.rest())
    assert rank.log.path.read_bytes() == data
    assert len(rank.raw) <= BURST_SIZE + HELD_SIZE
    assert len(rank.raw) + rank.left_out == len(data)
    head, tail = rank.raw[: BURST_SIZE - 100], rank.raw[-HELD_SIZE + 100 :]
    assert data.startswith(head)
    assert data.endswith(tail)
    # the lines that are shown are those of the log
    assert rank.texts == rank.raw.decode().splitlines()
    assert tail.count(b"\n") >= 100


def test_a_rank_that_writes_on_and_on_is_sent_at_a_rate_with_a_gap_a_second(rank: RankWriter) -> None:
    data = b"".join(map(line_of, range(5000)))
    for _ in range(100):
        rank.write(data)
        rank.wait(0.1)
    assert len(rank.raw) <= BURST_SIZE + 10 * BYTES_A_SECOND
    assert 8 <= sum(part.left_out > 0 for part in rank.sent) <= 10
    rank.wait(1.0)
    assert not rank.log.held
    assert len(rank.raw) + rank.left_out == rank.written
    # after a while without output all is sent again
    rank.wait(BURST_SIZE / BYTES_A_SECOND)
    before = len(rank.sent)
    rank.write(b"".join(map(line_of, range(20_000))))
    assert [part.left_out for part in rank.sent[before:]] == [0]


def test_a_traceback_in_the_middle_of_a_burst_is_sent(rank: RankWriter) -> None:
    traceback = b'Traceback (most recent call last):\n  File "a.py", line 7, in f\n    f()\nValueError: no such thing\n'
    noise = b"".join(map(line_of, range(30_000)))
    rank.write(noise + noise)
    rank.write(traceback)
    rank.write(noise)
    rank.take(rank.log.rest())
    assert traceback in rank.raw
    assert "ValueError: no such thing" in rank.texts
    assert len(rank.raw) + rank.left_out == rank.written


def test_errors_without_end_are_bounded_too(rank: RankWriter) -> None:
    for _ in range(10):
        rank.write(b"ERROR: something is wrong\n" * 10_000)
    rank.take(rank.log.rest())
    assert len(rank.raw) <= BURST_SIZE + 2 * HELD_SIZE


def test_one_endless_line_is_sent_as_it_is_shown(rank: RankWriter) -> None:
    rank.write(b"x" * (5 << 20) + b"\n" + b"end\n")
    rank.take(rank.log.rest())
    assert len(rank.raw) < HELD_SIZE
    assert rank.texts[0].endswith("… (5,242,880 bytes)")
    assert rank.texts[1] == "end"
    assert rank.log.path.stat().st_size == rank.written


def test_where_the_file_cannot_take_it_all_is_sent(rank: RankWriter) -> None:
    data = b"".join(map(line_of, range(LINES)))
    rank.write(data[: 3 << 20])
    with mock.patch.object(node_logs.os, "write", side_effect=OSError(28, "No space left on device")):
        rank.write(data[3 << 20 :])
    assert data.endswith(rank.raw[-(len(data) - (3 << 20)) :])
    assert len(rank.raw) + rank.left_out == len(data)


def test_old_folders_of_logs_are_removed_and_those_in_use_are_not(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}

    def folder_of(name: str, time: int) -> tuple[Path, int]:
        logs, lock = node_logs.open_logs(name, [0], environment)
        log = logs[0]
        log.close()
        os.utime(log.path.parent, (time, time))
        return log.path.parent, lock

    kept = [folder_of(f"used_{number}", 0) for number in range(2)]
    for number in range(node_logs.KEPT_RUNS + 5):
        os.close(folder_of(f"run_{number}", number)[1])
    last = folder_of("last", 0)
    names = {path.name for path in last[0].parent.iterdir()}
    assert {"used_0", "used_1", "last", f"run_{node_logs.KEPT_RUNS + 4}"} <= names
    assert len(names) <= node_logs.KEPT_RUNS + len(kept)
    for _, lock in (*kept, last):
        os.close(lock)


# ---------------------------------------------------------------------------------------------------- agents of "machines"


def whole_text() -> str:
    return "".join(line_of(number).decode() for number in range(LINES)) + "the burst is over\n"


def bursts(goes_on: str) -> None:
    sys.stdout.write(whole_text())
    sys.stdout.flush()
    while os.path.exists(goes_on):
        time.sleep(0.05)


def bursts_and_fails() -> None:
    sys.stdout.write(whole_text())
    print("about to fail", file=sys.stderr)
    if os.environ["RANK"] == "1":
        raise KeyError("of this rank")


@pytest.fixture
def logs(far_nodes: object) -> Path:
    """The parent of the folders in which the "machines" keep the logs of runs."""
    return Path(os.environ["XDG_CACHE_HOME"], "accelerate_nb_runs", "nodes")


@pytest.fixture
def start(logs: Path, tmp_path: Path) -> Callable[..., Run]:
    """Launches a function on two "machines"."""
    settings = {**TWO_NODES, "engine": "local", "config_file": "", "folder": str(tmp_path)}
    return lambda function, *args: launch(function, args, **settings)


def most_sent(run: Run) -> float:
    """The most bytes of a rank that may have been sent so far."""
    return BURST_SIZE + 2 * HELD_SIZE + (time.time() - run.started) * BYTES_A_SECOND


@pytest.mark.slow
def test_the_whole_log_stays_on_its_node_and_a_line_names_the_node_and_the_file(
    start: Callable[..., Run], logs: Path, tmp_path: Path
) -> None:
    goes_on = tmp_path / "goes on"
    goes_on.touch()
    run = start(bursts, str(goes_on))
    for rank in range(2):
        until(lambda rank=rank: any(line.text == "the burst is over" for line in run.view.tail(rank, 10)))
        bounded = run.logs(rank)
        assert len(bounded.encode()) < most_sent(run)
        _, node, path, number = GAP.findall(bounded)[0]
        assert (node, number) == (f"node {rank}", str(rank))
        assert Path(path).read_text() == whole_text()
        assert Path(path).is_relative_to(logs)
    goes_on.unlink()
    run.wait(60)


def test_the_last_words_and_the_traceback_of_a_rank_that_fails_are_there(start: Callable[..., Run]) -> None:
    run = start(bursts_and_fails)
    with pytest.raises(WorkerError, match="of this rank"):
        run.wait(60)
    bounded = run.logs(1)
    assert len(bounded.encode()) < most_sent(run)
    assert line_of(LINES - 1).decode() in bounded
    assert "about to fail" in bounded


def test_a_trace_that_a_rank_wrote_on_its_node_stays_there_and_its_path_is_known(
    start: Callable[..., Run], logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(steps_of_plain_torch, str(tmp_path))
    until(lambda: run.view.has_stepped and {rank.state for rank in run.view.glances()} == {"running"})
    # the "machines" don't have the run's folder
    send, elsewhere = run._control.send, f"/not here/{run.folder.name}"
    monkeypatch.setattr(
        run._control, "send", lambda rank, message: send(rank, structs.replace(message, folder=elsewhere))
    )
    run.profile(steps=2, ranks=[1])
    until(lambda: run.view.rank(1).profile is not None)
    trace = logs / run.folder.name / "profile_1_rank_1.json.gz"
    assert run.view.rank(1).profile.trace == str(trace)
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    (tmp_path / "end").touch()
    run.wait(60)
