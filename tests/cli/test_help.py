"""The command line answers at once, every command tells what it does, and what goes wrong in any is said in one place."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_nb.cli.main import COMMANDS, main
from tests.processes import python

HEAVY = {"torch", "numpy", "IPython", "nbformat", "rich", "questionary", "yaml", "cloudpickle", "asyncio"}
# Of CPU time; a machine that does other things too takes longer for the same work. Loading torch alone takes more than that.
SECONDS = 1.0


def cpu_seconds(words: list[str]) -> float:
    """The CPU time of a fresh process, with what it started."""
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("words", [["--help"], ["launch", "--help"]], ids=" ".join)
def test_help_takes_under_a_second_of_cpu_time(words: list[str]) -> None:
    # a busy machine has cold caches; one run in five that is fast shows that nothing slow is done
    assert any(cpu_seconds(["-m", "accelerate_nb", *words]) < SECONDS for _ in range(5))


@pytest.mark.parametrize("words", ["--help", "launch --help", "export --help", "config --help"])
def test_help_imports_nothing_heavy(words: str) -> None:
    done = python("-X", "importtime", "-m", "accelerate_nb", *words.split(), check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "accelerate_nb" in imported
    assert imported & HEAVY == set()


def test_every_command_that_the_help_lists_has_a_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out
    for name in COMMANDS:
        assert name in listed
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: accelerate-nb {name}")


@pytest.mark.parametrize("words", [["attach"], ["stop", "my run", "--kill"], ["logs", "--help"]], ids=" ".join)
def test_a_word_of_runs_alone_prints_the_whole_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    line = shlex.join(["accelerate-nb", "runs", *words])
    assert capsys.readouterr().err == f"accelerate-nb: {words[0]!r} is no command. To do this with a run: {line}\n"


def test_a_wrong_flag_by_itself_is_one_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--versoin"]) == 2
    assert "Did you mean --version?" in capsys.readouterr().err


# What Python raises is the same as where torch is not installed.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from accelerate_nb.cli.main import main; sys.exit(main())"


@pytest.mark.parametrize("words", [["estimate-memory", "model.py:Net"], ["merge-weights", "shards", "merged"]])
def test_what_needs_torch_is_an_error_where_it_is_not_installed(words: list[str]) -> None:
    done = python("-c", WITHOUT_TORCH, *words)
    assert done.returncode == 1
    assert done.stderr.startswith("accelerate-nb: This needs torch, which is not installed for ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", ["runs", "env", "export notebook.ipynb --stdout"])
def test_a_command_works_without_an_open_output_and_names_a_full_disk(words: str, tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": "x = 1", "metadata": {}, "outputs": [], "execution_count": None}]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    (tmp_path / "notebook.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    command = f"{shlex.quote(sys.executable)} -m accelerate_nb {words}"
    lines = [f"{command} {where}" for where in (">&-", ">/dev/full")]
    found = [subprocess.run(["sh", "-c", line], capture_output=True, text=True) for line in lines]
    full = "accelerate-nb: No space is left on a disk to which this command writes. Free some, or write elsewhere.\n"
    assert [(done.returncode, done.stderr) for done in found] == [(0, ""), (1, full)]


def test_a_message_stays_out_of_the_output_where_standard_error_is_closed() -> None:
    command = f"{shlex.quote(sys.executable)} -m accelerate_nb launch none.py 2>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("words", [["launch", "train.py"], ["launch", sys.executable], ["env"]], ids=" ".join)
def test_a_current_folder_that_was_removed_is_named(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(words) == 1
    assert capsys.readouterr().err == "accelerate-nb: The current folder was removed. Change to another one: cd ~\n"


@pytest.mark.parametrize("words", ["launch closed/train.py", "runs --folder closed", "merge-weights closed merged"])
def test_a_folder_that_can_not_be_searched_is_named(words: str, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    # the permissions hold for root, too, without these capabilities
    limits = ["--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-dac_override,-dac_read_search"]
    prefix = ["setpriv", *limits] if os.geteuid() == 0 else []
    command = [*prefix, sys.executable, "-m", "accelerate_nb", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in {1, 2}
    assert re.fullmatch(r".*closed.* can't be .*Permission denied\..*\n", done.stderr)
