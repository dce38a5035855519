"""A run comes to its end whatever happens to its folder, and says why."""

import os
import re
import shutil
import threading
import time
import warnings
from pathlib import Path

import pytest

from accelerate_nb import HangError, launch
from accelerate_nb.events.run_reader import kept_runs, view_of
from accelerate_nb.notebook.display.message_feed import MessageFeed
from accelerate_nb.reports.report import run_report
from accelerate_nb.reports.summary import RunFacts
from tests.worker.test_control_channel import waits_for

SETTINGS = {"num_processes": 1, "cpu": True, "config_file": "", "timeout": 60}


def removes(folder):
    shutil.rmtree(folder)
    print("still here")
    return 5


def fills(folder):
    """From now on the disk is full, as far as this rank's log goes."""
    (run,) = Path(folder).iterdir()
    (run / "rank_0.log").symlink_to("/dev/full")
    for number in range(20_000):
        print("line", number)
    return 6


def test_a_folder_that_is_removed_costs_the_record_and_not_the_run(tmp_path):
    run = launch(removes, (str(tmp_path / "runs"),), folder=str(tmp_path / "runs"), **SETTINGS)
    with pytest.warns(
        RuntimeWarning, match=r"Not all of the run is kept: its folder was removed, with the output in it\.$"
    ):
        assert run.wait(60) == 5
    assert [line.text for line in run.view.tail(0, 10)] == ["still here"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no disk that is always full")
def test_a_full_disk_costs_lines_of_the_log_and_not_the_run(tmp_path):
    run = launch(fills, (str(tmp_path),), folder=str(tmp_path), **SETTINGS)
    why = r"Not all .* in .*: No space left on device\. What .* is lost\. Free space there, or .*: the setting `folder` \(A.*\)\.$"
    with pytest.warns(RuntimeWarning, match=why):
        assert run.wait(60) == 6
    assert run.view.line_count == 20_000
    assert run.state == "finished"


def test_a_wait_that_takes_too_long_leaves_the_run_running(tmp_path):
    run = launch(waits_for, (str(tmp_path / "go"),), folder=str(tmp_path / "runs"), **SETTINGS)
    with pytest.raises(TimeoutError, match=r"has not ended after 0\.05 s"):
        run.wait(0.05)
    assert not run.done
    assert run.results == []
    (tmp_path / "go").touch()
    assert run.wait(60) == "well"
    assert run.done
    assert run.wait() == "well"


def waits_for_ever():
    if os.environ["RANK"] == "1":
        time.sleep(61)
    time.sleep(60)


def test_a_run_whose_time_is_over_reports_which_ranks_waited_where(tmp_path):
    settings = {**SETTINGS, "num_processes": 2}
    launch(print, folder=str(tmp_path / "before"), **settings).wait()  # what starts workers is there
    run = launch(waits_for_ever, folder=str(tmp_path / "runs"), **{**settings, "timeout": 4})
    with pytest.raises(HangError):
        run.wait(60)
    facts = RunFacts.of(run, "", background=False, can_act=False)
    (kept,) = kept_runs(tmp_path / "runs")
    last, *_ = MessageFeed(run.view).backlog(facts)
    reports = run_report(facts, run.view), run_report(facts, view_of(kept))
    for text_of_hang in (last["failure"]["message"], *(text for item in reports for text in item.values())):
        assert "timeout=4: the run had not ended after 4 s, and was stopped" in text_of_hang
        assert re.search(r"rank 0 is at .*: time\.sleep\(60\)", text_of_hang)
        assert re.search(r"rank 1 is at .*: time\.sleep\(61\)", text_of_hang)
    assert "in waits_for_ever" in last["failure"]["traceback"]
    assert last["state"]["detail"] == "timeout=4: the run had not ended after 4 s, and was stopped"


def test_a_fork_in_the_background_leaves_a_recording_of_warnings_alone(monkeypatch, tmp_path):
    forks, records, fork = threading.Event(), threading.Event(), os.fork
    monkeypatch.setattr(os, "fork", lambda: (forks.set(), records.wait(20), fork())[-1])
    run = launch(abs, (-1,), start_method="fork", folder=str(tmp_path), **SETTINGS)
    assert forks.wait(20)
    with warnings.catch_warnings(record=True) as recorded:
        records.set()
        assert run.wait() == 1
        warnings.warn("from the notebook", UserWarning, stacklevel=1)
    assert "from the notebook" in [str(item.message) for item in recorded]
