"""A run is read back from its folder as it was, and whatever state the folder is in."""

import json
import os
import shutil
from contextlib import closing

import pytest

from accelerate_nb.events.event_types import Failure, LogLine, Metric, Progress, Restart, StateChange
from accelerate_nb.events.run_folder import RunRecorder, prune
from accelerate_nb.events.run_reader import LogFollower, kept_run, kept_runs, view_of
from accelerate_nb.events.run_state import RunState
from tests.processes import python

EVENTS = [
    StateChange(None, "running", 10.0, "2 on the CPU"),
    *(StateChange(rank, "running", 11.0) for rank in (0, 1)),
    *(Metric(rank, "loss", 1 / (step + 1), step, 12.0 + step) for step in range(20) for rank in (0, 1)),
    Progress(0, "train", 20, 20, 40.0, closed=True),
    Failure(1, "ValueError", "bad", "Traceback", 41.0, frames=()),
    StateChange(1, "failed", 41.0),
    StateChange(None, "failed", 42.0),
]
FACTS = {"name": "train", "why": "2 on the CPU", "started": 10.0, "ranks": 2}


def kept(folder, events=EVENTS, lines=3, **status):
    with closing(RunRecorder(folder)) as record:
        for event in events:
            record.event(event)
        for rank in (0, 1):
            record.output(rank, b"".join(b"line %d\n" % number for number in range(lines)))
        record.status(**{**FACTS, "state": "failed", "ended": 42.0, "error": "rank 1 stopped", **status})
    return folder


@pytest.fixture
def folder(tmp_path):
    return kept(tmp_path / "2024-01-02_030405_train")


def test_what_is_read_back_is_what_happened(folder):
    now, then = view_of(kept_run(folder)), RunState(2)
    for event in [*EVENTS, *(LogLine(rank, "stdout", f"line {n}", 42.0) for rank in (0, 1) for n in range(3))]:
        then.apply(event)
    assert [now.rank(rank) for rank in now.ranks] == [then.rank(rank) for rank in then.ranks]
    assert (now.state, now.ended, now.line_count) == (then.state, then.ended, then.line_count)
    assert now.since(0) == then.since(0)


def test_the_status_shows_what_the_run_was(folder):
    run = kept_run(folder)
    assert (run.name, run.why, run.state, run.started, run.ended) == ("train", "2 on the CPU", "failed", 10.0, 42.0)
    assert (run.ranks, run.error, run.is_over) == (2, "rank 1 stopped", True)


def test_of_a_long_log_the_last_lines_are_read_and_the_others_counted(tmp_path):
    run = kept_run(kept(tmp_path / "run", lines=150_000))
    view = view_of(run)
    assert view.line_count == 300_000
    assert view.since(0).skipped == 300_000 - 2000
    assert [line.text for line in view.tail(1, 2)] == ["line 149998", "line 149999"]
    # also where it is larger than what is read
    (tmp_path / "rank_0.log").write_bytes(b"x" * 999 + b"\n" + b"y\n" * 2_500_000)
    log = LogFollower(0, tmp_path, lines=10)
    assert (log.new(), log.skipped) == (["y"] * 10, 2_500_001 - 10)


METRIC = b'{"type": "metric", "rank": 0, "name": "a", "value": 1, "step": 1, "time": 50}\n'
OF_ANOTHER_KIND = '{"state": 7, "ranks": "two", "started": null, "pid": {}}'
DAMAGE = {
    "a torn last event": lambda folder: cut(folder / "events.jsonl", 25),
    "a torn last line": lambda folder: cut(folder / "rank_0.log", 3),
    "an event of a newer version": lambda folder: add(folder, b'{"type": "weather", "rank": 0, "sun": true}\n'),
    "a field of a newer version": lambda folder: add(folder, METRIC[:-2] + b', "unit": "m"}\n'),
    "a field too few": lambda folder: add(folder, b'{"type": "metric", "rank": 0}\n'),
    "no objects": lambda folder: add(folder, b'[1]\n3\n"a"\nnull\n\xff\xfe\n\n'),
    "no events": lambda folder: (folder / "events.jsonl").unlink(),
    "no logs": lambda folder: [path.unlink() for path in folder.glob("rank_*.log")],
    "no status": lambda folder: (folder / "status.json").unlink(),
    "a torn status": lambda folder: cut(folder / "status.json", 30),
    "a status that is a list": lambda folder: (folder / "status.json").write_text("[]"),
    "facts of another kind": lambda folder: (folder / "status.json").write_text(OF_ANOTHER_KIND),
    "a directory for a log": lambda folder: (folder / "rank_7.log").mkdir(),
}


def cut(path, bytes_):
    path.write_bytes(path.read_bytes()[:-bytes_])


def add(folder, line):
    with (folder / "events.jsonl").open("ab") as file:
        file.write(line)


@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_state_a_folder_is_in_the_rest_is_read(folder, damage):
    DAMAGE[damage](folder)
    run = kept_run(folder)
    view = view_of(run)
    assert (run.name, view.state) == ("train", "failed")
    assert damage == "no events" or len(view.rank(1).series["loss"]) == 20
    assert damage == "no logs" or view.tail(1, 1)[0].text == "line 2"


def test_a_folder_that_no_run_has_written_to_is_no_run(tmp_path):
    assert kept_run(tmp_path) is None
    assert kept_run(tmp_path / "nowhere") is None
    assert kept_runs(tmp_path / "nowhere") == []


def test_a_run_of_an_earlier_version_is_known_by_its_folders_name(tmp_path):
    folder = tmp_path / "2024-01-02_030405_my_function"
    folder.mkdir()
    (folder / "status.json").write_text('{"state": "finished", "why": "1", "error": null, "time": 1704164700.0}')
    (folder / "rank_0.log").write_text("a\n")
    run = kept_run(folder)
    assert (run.name, run.state, run.ended, run.ranks, run.error) == ("my_function", "finished", 1704164700.0, 1, "")


def test_runs_come_newest_first(tmp_path):
    for number in range(3):
        kept(tmp_path / f"2024-01-0{number + 1}_000000_train", started=100.0 + number)
    (tmp_path / "something else").mkdir()
    assert [run.started for run in kept_runs(tmp_path)] == [102.0, 101.0, 100.0]


RUNNING = {"state": "running", "ended": None, "error": None}


def change_status(folder, **facts):
    status = json.loads((folder / "status.json").read_text())
    assert status["pid"] == os.getpid()
    (folder / "status.json").write_text(json.dumps({**status, **facts}))


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({}, "running"),
        # another process with the launcher's number is not the launcher
        ({"process_began": 7.0}, "failed"),
        # of a process of another machine nothing is known
        ({"host": "elsewhere", "pid": 2**22 + 1}, "running"),
    ],
)
def test_a_run_goes_on_while_the_process_that_launched_it_does(tmp_path, changed, state):
    folder = kept(tmp_path / "run", EVENTS[:10], **RUNNING)
    change_status(folder, **changed)
    run = kept_run(folder)
    assert (run.state, run.is_over, run.ended) == (state, state == "failed", None)
    assert view_of(run).state == state


def test_a_run_whose_launcher_died_has_failed_and_reports_it(tmp_path):
    script = (
        "import sys; from pathlib import Path; from accelerate_nb.events.run_folder import RunRecorder;"
        "RunRecorder(Path(sys.argv[1])).status(state='running', name='train', ranks=2, started=10.0)"
    )
    python("-c", script, tmp_path / "run", check=True)
    run = kept_run(tmp_path / "run")
    assert (run.state, run.ended) == ("failed", None)
    assert "has gone" in run.error
    view = view_of(run)
    assert (view.state, view.detail) == ("failed", run.error)


def test_what_goes_on_is_not_removed_and_what_died_is(tmp_path):
    alive = kept(tmp_path / "2020-01-01_000000_alive", [], **RUNNING)
    dead = kept(tmp_path / "2020-01-01_000001_dead", [], **RUNNING)
    change_status(dead, process_began=0.0)
    for number in range(60):
        (tmp_path / f"2021-01-01_{number:06}_train").mkdir()
    prune(tmp_path)
    assert alive.is_dir()
    assert not dead.exists()


def test_each_attempt_has_its_own_logs_in_which_others_find_lines_as_soon_as_they_are_kept(tmp_path):
    with closing(RunRecorder(tmp_path)) as record:
        follower = LogFollower(0, tmp_path, 10)
        assert follower.new() == []
        record.output(0, b"one\ntwo\n")
        assert follower.new() == ["one", "two"]
        record.output(0, b"first\n")
        assert follower.new() == ["first"]
        assert follower.new() == []
        record.output(0, b"last\n")
        for attempt in range(2):
            record.put_logs_aside(attempt)
            record.event(Restart(attempt + 1, 2, "rank 0 ended with SIGKILL", 0.1, 2.0))
            record.output(0, b"again %d\n" % (attempt + 1))
        record.status(**FACTS, state="running", restarts=2)
        assert follower.new() == ["last", "again 1", "again 2"]
        assert follower.new() == []
        record.output(0, b"more\n")
        assert follower.new() == ["more"]
        assert LogFollower(0, tmp_path, 10).new() == ["again 2", "more"]
    assert (tmp_path / "rank_0.log").read_text() == "again 2\nmore\n"
    assert (tmp_path / "attempt_0" / "rank_0.log").read_text() == "one\ntwo\nfirst\nlast\n"
    assert (tmp_path / "attempt_1" / "rank_0.log").read_text() == "again 1\n"
    run = kept_run(tmp_path)
    view = view_of(run)
    assert run.restarts == 2
    assert [line.text for line in view.tail(0, 10)] == ["one", "two", "first", "last", "again 1", "again 2", "more"]
    assert [item.attempt for item in view.restarts] == [1, 2]


def test_a_follower_begins_with_the_last_lines_and_shows_no_half_ones(folder):
    follower = LogFollower(0, folder, 2)
    assert follower.new() == ["line 1", "line 2"]
    with (folder / "rank_0.log").open("ab") as file:
        file.write(b"10%\r20%\r\nhal")
    assert follower.new() == ["20%"]
    with (folder / "rank_0.log").open("ab") as file:
        file.write(b"f\n")
    assert follower.new() == ["half"]
    shutil.rmtree(folder)
    assert follower.new() == []
