"""A run comes to its end whatever happens to its folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from accelerate_nb import launch

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
    with pytest.warns(RuntimeWarning, match="Not all of the run is kept"):
        assert run.wait(60) == 5
    assert [line.text for line in run.view.tail(0, 10)] == ["still here"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no disk that is always full")
def test_a_full_disk_costs_lines_of_the_log_and_not_the_run(tmp_path):
    run = launch(fills, (str(tmp_path),), folder=str(tmp_path), **SETTINGS)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert run.wait(60) == 6
    assert run.view.line_count == 20_000
    assert run.view.state == "finished"


def test_a_wait_that_takes_too_long_leaves_the_run_running(tmp_path):
    here, gone = tmp_path / "here", tmp_path / "go"
    run = launch(waits_for, (str(here), str(gone)), folder=str(tmp_path / "runs"), **SETTINGS)
    with pytest.raises(TimeoutError, match=r"has not ended after 0\.05 s"):
        run.wait(0.05)
    assert not run.done
    assert run.results == []
    gone.touch()
    assert run.wait(60) == "went"
    assert run.done
    assert run.wait() == "went"


def waits_for(here, gone):
    import threading

    pause = threading.Event()
    Path(here).touch()
    while not Path(gone).exists():
        pause.wait(0.01)
    return "went"
