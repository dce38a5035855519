"""`accelerate-nb launch --dry-run` tells what would happen, and starts nothing."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from accelerate_nb.cli.main import main
from tests.export.making import code, markdown, notebook


@pytest.fixture(autouse=True)
def _script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # in one write, which another rank's can't cut: print makes several where PYTHONUNBUFFERED is set
    (folder / "train.py").write_text("import os, sys; sys.stdout.write(f\"{os.environ['RANK']} {sys.argv[1:]}\\n\")")


def dry_run_output(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[dict[str, list[str]], str]:
    """What is told, by headings, and what is complained of."""
    assert main(["launch", "--dry-run", *words]) == code
    out, err = capsys.readouterr()
    parts = [part.splitlines() for part in out.strip().split("\n\n")]
    return {title: [" ".join(line.split()) for line in rows] for title, *rows in parts}, err


def test_each_setting_is_printed_with_the_place_where_it_was_set(folder, capsys, monkeypatch):
    (folder / "file.yaml").write_text("mixed_precision: fp16\nnum_processes: 2\n")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    parts, _ = dry_run_output(capsys, "--config_file", "file.yaml", "--debug", "train.py", "a", "b c")
    assert parts["What is run"] == [f"script {folder / 'train.py'}", "arguments a 'b c'", f"works in {folder}"]
    assert "cpu True the variable ACCELERATE_USE_CPU" in parts["Engine and devices"]
    assert "num_processes 2 file.yaml" in parts["Processes"]
    assert "mixed_precision fp16 file.yaml" in parts["Precision"]
    assert "debug True the command line" in parts["Training"]
    assert "stop_grace_period 2.0 default" in parts["Time limits, failures"]
    assert parts["What starts"] == ["processes 2", "device cpu", "why 2 on the CPU; forked by a supervisor"]
    assert not [*folder.rglob("runs")]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--", "train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["train.py", "--", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["train.py", "--", "--", "1"], ["train.py", "--", "1"]),
        (["--", "train.py", "--", "1"], ["train.py", "--", "1"]),
        (["train.py", "1", "--", "2"], ["train.py", "1", "--", "2"]),
        (["train.py", "--"], ["train.py"]),
        (["-m", "--", "json.tool", "-h"], ["-m", "json.tool", "-h"]),
    ],
)
def test_one_separator_beside_the_programs_name_is_no_argument_as_in_accelerate(words, what, capsys):
    from accelerate.commands.launch import launch_command_parser

    theirs = launch_command_parser().parse_args(["--cpu", *words])
    assert [*(["-m"] if theirs.module else []), theirs.training_script, *theirs.training_script_args] == what
    parts, _ = dry_run_output(capsys, "--cpu", *words)
    assert parts["The same with torchrun"][0].endswith(shlex.join(["--nproc-per-node", "1", *what]))
    # a job of SLURM reads the words again
    assert main(["launch", "--dry-run", "--slurm", "--cpu", *words]) == 0
    assert f" {shlex.join(words)} &\n" in capsys.readouterr().out


def test_a_separator_before_a_notebooks_name_leaves_the_one_for_its_parameters(capsys):
    notebook(Path("train.ipynb"), code("lr = 0.1", "parameters"), "print(lr)")
    parts, _ = dry_run_output(capsys, "--cpu", "--", "train.ipynb", "--", "--lr", "1")
    assert "arguments --lr 1" in parts["What is run"]


@pytest.mark.slow
def test_the_line_for_torchrun_starts_the_same_processes(capsys):
    parts, _ = dry_run_output(capsys, "--cpu", "-n", "2", "--mixed_precision", "bf16", "train.py", "--lr", "0.1")
    (line,) = parts["The same with torchrun"]
    assert "ACCELERATE_MIXED_PRECISION=bf16 " in line
    assert line.endswith("torchrun --standalone --nproc-per-node 2 train.py --lr 0.1")
    words = ["env", *shlex.split(line)]
    words[words.index("torchrun") : words.index("torchrun") + 1] = [sys.executable, "-m", "torch.distributed.run"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True)
    assert sorted(done.stdout.splitlines()) == ["0 ['--lr', '0.1']", "1 ['--lr', '0.1']"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--use_port", "2345", "train.py"], "--master-port 2345 --nproc-per-node 1 train.py"),
        (["--max_restarts", "2", "-m", "json"], "--standalone --nproc-per-node 1 --max-restarts 2 -m json"),
        (
            ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1", "-n", "4", "train.py"],
            "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 2 train.py",
        ),
        (
            ["--num_machines", "1:2", "--rdzv_backend", "c10d", "--rdzv_endpoint", "10.0.0.1:1", "-n", "4", "train.py"],
            "--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:1 --rdzv-id none --nproc-per-node 2 train.py",
        ),
        (["--no_python", "sh", "-c", "exit"], "--standalone --nproc-per-node 1 --no-python {sh} -c exit"),
    ],
)
def test_the_line_for_torchrun_sets_what_was_requested(words, line, capsys):
    parts, _ = dry_run_output(capsys, "--cpu", *words)
    assert parts["The same with torchrun"][0].endswith("torchrun " + line.format(sh=shutil.which("sh")))


def test_a_notebook_is_reported_with_its_cells_and_parameters(capsys):
    cells = [markdown("# Title"), code("lr = 0.1", "parameters"), "!pip install nothing\nprint(lr)", ""]
    notebook(Path("train.ipynb"), *cells)
    parts, _ = dry_run_output(capsys, "train.ipynb", "--cpu", "-n", "2", "--", "--lr", "0.5")
    what = ["notebook train.ipynb", "cells of code 2", "parameters lr = 0.1", "arguments --lr 0.5"]
    assert parts["What is run"] == [*what, f"works in {os.getcwd()}"]
    first, second = parts["The same with torchrun"]
    assert first == "accelerate-nb export train.ipynb"
    assert second.endswith("torchrun --standalone --nproc-per-node 2 train.py --lr 0.5")


def test_flags_that_change_nothing_are_reported_with_the_reason(capsys):
    words = ["--cpu", "--same_network", "--zero_stage", "2", "--fp8_backend", "ao", "train.py"]
    parts, err = dry_run_output(capsys, *words)
    assert parts["Flags that change nothing"] == [
        "--same_network machines meet at the address of node 0, whatever network they are in",
        "--zero_stage it is an option of DeepSpeed, which --use_deepspeed requests",
    ]
    assert err.splitlines() == [
        "accelerate-nb launch: --zero_stage changes nothing: it is an option of DeepSpeed, which --use_deepspeed requests."
    ]
    assert "ACCELERATE_FP8_BACKEND ao" in parts["Environment of every process"]


def test_what_would_not_start_is_reported_as_the_launch_would_report_it(capsys):
    parts, err = dry_run_output(capsys, "--engine", "inline", "-n", "2", "--cpu", "train.py", code=1)
    assert "engine inline the command line" in parts["Engine and devices"]
    assert "What starts" not in parts
    assert main(["launch", "--engine", "inline", "-n", "2", "--cpu", "train.py"]) == 1
    problem = capsys.readouterr().err.partition(": ")[2]
    assert err.partition(": ")[2] == problem
    assert problem.startswith("engine='inline' was requested with num_processes=2")


def test_a_terminal_shows_it_in_colours():
    command = f"{shlex.quote(sys.executable)} -m accelerate_nb launch --cpu --dry-run train.py"
    environment = {**os.environ, "TERM": "xterm-256color"}
    out, code = pexpect.run(command, withexitstatus=True, env=environment, timeout=60, dimensions=(60, 200))
    assert code == 0
    assert b"\x1b[1mWhat is run\x1b[0m" in out
    assert b"torchrun --standalone" in out
