"""Runs that outlive their terminal: launched, attached to, stopped and removed from the command line."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from accelerate_nb import runs
from accelerate_nb.cli.main import main
from tests.export.making import code, notebook

TWO = ("--cpu", "-n", "2")
COUNTS = """
import os, sys, time
for number in range(int(sys.argv[1])):
    print("number", number, flush=True)
    time.sleep(0.05)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def _script(folder: Path) -> None:
    (folder / "counts.py").write_text(COUNTS)


def test_a_script_is_attached_to_and_ends_the_command_as_it_ended(capfd):
    assert main(["launch", "--detach", *TWO, "counts.py", "20", "3"]) == 0
    out = capfd.readouterr().out
    name = runs()[0].folder.name
    assert f"accelerate-nb runs attach {name}" in out
    assert main(["runs", "attach"]) == 3
    out = capfd.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("[1]")] == [f"[1] number {at}" for at in range(20)]
    # what is over is shown again, and can't be stopped any more
    assert main(["runs", "attach", name]) == 3
    assert main(["runs", "stop", name]) == 0
    assert "is over: failed" in capfd.readouterr().out


def test_an_interrupt_leaves_the_run_alone_and_a_stop_ends_it(capfd):
    assert main(["launch", "--detach", *TWO, "counts.py", "100000", "0"]) == 0
    words = [sys.executable, "-m", "accelerate_nb", "runs", "attach"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as attached:
        assert "number" in attached.stdout.readline()
        attached.send_signal(signal.SIGINT)
        _, err = attached.communicate(timeout=30)
    assert attached.returncode == 0
    assert "goes on" in err
    assert runs()[0].state == "running"
    assert main(["runs", "prune", "--keep", "0"]) == 0
    assert main(["runs", "stop"]) == 0
    assert "stopped, as requested" in capfd.readouterr().out
    assert runs()[0].state == "stopped"


def test_a_notebook_runs_detached_with_its_parameters(capfd):
    notebook(Path("train.ipynb"), code("count = 1", "parameters"), "print('count is', count)")
    assert main(["launch", "train.ipynb", "--detach", "--cpu", "-n", "1", "--", "--count", "7"]) == 0
    assert "train.ipynb runs detached on 1 rank (" in capfd.readouterr().out
    assert main(["runs", "attach"]) == 0
    assert "count is 7" in capfd.readouterr().out
    # the script stays with the run
    assert (runs()[0].folder / "train.py").is_file()


def test_runs_are_removed_by_name_by_number_or_by_age(folder, capfd):
    for age, name in ((30, "old"), (2, "newer"), (1, "newest")):
        started = time.time() - 86_400 * age
        made = folder / "runs" / f"{time.strftime('%Y-%m-%d_%H%M%S', time.localtime(started))}_{name}"
        made.mkdir(parents=True)
        facts = {"name": name, "state": "finished", "started": started, "ranks": 2}
        (made / "status.json").write_text(json.dumps(facts))
    assert main(["runs", "prune"]) != 0
    assert "No run was named" in capfd.readouterr().err
    for flag, number in (("--keep", "-1"), ("--older-than", "-7.0"), ("--older-than", "nan")):
        assert main(["runs", "prune", flag, number]) == 2
        assert f"{flag} was given {number}, and nothing was removed" in capfd.readouterr().err
    assert len(runs()) == 3
    assert main(["runs", "prune", "--older-than", "7", "--dry-run"]) == 0
    assert len(runs()) == 3
    assert main(["runs", "prune", "--older-than", "7"]) == 0
    assert [item.name for item in runs()] == ["newest", "newer"]
    assert main(["runs", "prune", "--keep", "1"]) == 0
    assert [item.name for item in runs()] == ["newest"]
    assert main(["runs", "prune", "newest"]) == 0
    assert len(runs()) == 0
    assert os.listdir(folder / "runs") == []


def test_a_run_of_another_host_that_wrote_nothing_for_a_day_is_shown_and_removed_by_name(folder, capfd, monkeypatch):
    now = time.time()
    for name, age in (("silent", 2 * 86_400), ("recent", 60)):
        made = folder / "runs" / f"2024-01-01_000000_{name}"
        made.mkdir(parents=True)
        facts = {"name": name, "state": "running", "host": "elsewhere", "detached": True, "started": now - 3 * 86_400}
        (made / "status.json").write_text(json.dumps(facts))
        os.utime(made / "status.json", (now - age, now - age))
    assert main(["runs"]) == 0
    silent, recent = sorted(capfd.readouterr().out.splitlines()[-2:], key=lambda line: "recent" in line)
    assert "running, not heard of for 2 days" in silent
    assert "running, detached" in recent
    # flags leave both
    assert main(["runs", "prune", "--keep", "0"]) == 0
    assert main(["runs", "prune", "recent"]) != 0
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
        assert main(["runs", "prune", "silent"]) == 2
    assert "_silent was to be removed, and can't be: Permission denied." in capfd.readouterr().err
    assert main(["runs", "prune", "silent"]) == 0
    assert [item.name for item in runs()] == ["recent"]
