"""A run's folder holds all that happened, and making one touches nobody else's files."""

import json
import os
import stat
import time
from contextlib import closing

from accelerate_nb.events.event_codec import from_line
from accelerate_nb.events.event_types import DeviceSample, Failure, HostSample, LogLine, Metric, Progress, StateChange
from accelerate_nb.events.run_folder import BETWEEN_OUTPUT_FLUSHES, KEPT_RUNS, RunRecorder, new_folder, prune


def test_each_rank_s_bytes_are_kept_as_they_came_also_once_the_record_is_closed(tmp_path):
    with closing(RunRecorder(tmp_path / "run")) as record:
        record.output(0, b"one\r\n\xff\n")
        record.output(1, b"other\n")
        record.output(0, b"two\n")
    with closing(record):
        record.output(0, b"three\n")
    assert (tmp_path / "run" / "rank_0.log").read_bytes() == b"one\r\n\xff\ntwo\nthree\n"
    assert (tmp_path / "run" / "rank_1.log").read_bytes() == b"other\n"


def test_events_are_kept_and_metrics_also_by_themselves(tmp_path):
    metric, state = Metric(0, "loss", 0.5, 1, 2.0), StateChange(0, "running", 1.0)
    # what comes every moment of a long run is not kept
    moves, ends = (Progress(0, "epoch", 3, 3, 0.0, closed=closed) for closed in (False, True))
    busy = (DeviceSample(0, "cpu", 5.0, 1, 2, 0.0), HostSample(5.0, (1, 2), None, None, 0.0))
    with closing(RunRecorder(tmp_path)) as record:
        for event in (state, metric, LogLine(0, "stdout", "in the log already", 0.0), moves, ends, *busy):
            record.event(event)
    kept = {name: (tmp_path / name).read_bytes().splitlines() for name in ("events.jsonl", "metrics.jsonl")}
    assert [from_line(line) for line in kept["events.jsonl"]] == [state, metric, ends]
    assert [from_line(line) for line in kept["metrics.jsonl"]] == [metric]


def test_output_of_many_ranks_is_written_together_and_at_once_after_a_pause_and_before_a_failure(tmp_path):
    with closing(RunRecorder(tmp_path)) as record:
        record.add_output(0, b"one\n")
        assert (tmp_path / "rank_0.log").read_bytes() == b"one\n"
        now = time.monotonic()
        record.add_output(0, b"two\n")
        record.add_output(1, b"other\n")
        assert record.has_unwritten
        record.flush_output(now + BETWEEN_OUTPUT_FLUSHES)
        assert not record.has_unwritten
        assert (tmp_path / "rank_0.log").read_bytes() == b"one\ntwo\n"
        assert (tmp_path / "rank_1.log").read_bytes() == b"other\n"
        record.add_output(1, b"about to fail\n")
        record.event(Failure(1, "KeyError", "'a'", "", 1.0))
        assert (tmp_path / "rank_1.log").read_bytes() == b"other\nabout to fail\n"


def test_who_reads_the_status_finds_the_events_before_it(tmp_path):
    with closing(RunRecorder(tmp_path)) as record:
        record.event(StateChange(None, "finished", 1.0))
        record.status(state="finished")
        assert from_line((tmp_path / "events.jsonl").read_bytes()) == StateChange(None, "finished", 1.0)


def test_the_status_is_replaced_as_a_whole(tmp_path):
    with closing(RunRecorder(tmp_path)) as record:
        record.status(state="running")
        first = (tmp_path / "status.json").open()
        record.status(state="finished", error=None)
    with first:
        assert json.load(first)["state"] == "running"
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["error"]) == ("finished", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["status.json"]


def test_runs_of_the_same_second_have_folders_of_their_own_that_only_their_user_can_open(tmp_path):
    folders = [new_folder(tmp_path / "runs", "train <lambda>/../x") for _ in range(5)]
    assert len(set(folders)) == 5
    for folder in folders:
        assert folder.parent == tmp_path / "runs"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert "train__lambda" in folder.name


def test_the_oldest_runs_are_removed_and_nothing_else(tmp_path):
    outside = tmp_path.parent / f"{tmp_path.name} outside"
    made = [tmp_path / f"2020-01-01_{number:06}_train" for number in range(KEPT_RUNS + 5)]
    others = [tmp_path / "notes" / "file", tmp_path / "0000 my data" / "file", outside / "status.json"]
    for file in (*others, *(folder / "status.json" for folder in made)):
        file.parent.mkdir()
        file.touch()
    others += [tmp_path / "status.json", tmp_path / "0001-01-01_000000_running"]
    others[-2].touch()
    others[-1].mkdir()  # it has no status yet
    os.symlink(outside, tmp_path / "0002 link")
    new = new_folder(tmp_path, "train")
    prune(tmp_path)
    left = [folder for folder in made if folder.exists()]
    assert left == made[-len(left) :]
    assert len(left) == KEPT_RUNS - 1  # and the new one
    assert new.is_dir()
    assert all(path.exists() for path in others)
