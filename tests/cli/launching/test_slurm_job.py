"""`accelerate-nb launch --slurm` writes a batch script that launches it on the job's nodes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_nb.cli.launching.slurm_job import SlurmJob, more_options, notice, submit
from accelerate_nb.cli.main import main
from accelerate_nb.errors import ConfigurationError, LaunchError


@pytest.fixture(autouse=True)
def _script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")


def test_a_dry_run_prints_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "2", "--gpus-per-node", "4", "--time", "4:00", "--partition", "main", "--sbatch", "account=lab"]
    settings = ["--mixed_precision", "bf16", "--folder", str(tmp_path / "my runs"), "--quiet"]
    assert main(["launch", "--slurm", "--dry-run", *words, *settings, "train.py", "--lr", "a b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in ("--nodes=2", "--gpus-per-node=4", "--time=4:00", "--partition=main", "--account=lab", "--no-requeue"):
        assert f"#SBATCH {line}" in lines
    # a quarter of four minutes before the end
    assert "#SBATCH --signal=B:USR1@60" in lines
    assert f"#SBATCH '--output={tmp_path}/my runs/slurm_%j.log'" in lines
    (command,) = (line for line in lines if line.endswith("&"))
    assert command == (
        f"{sys.executable} -m accelerate_nb.cli.main launch --engine slurm --config-file= --mixed-precision bf16 --quiet "
        f"--folder '{tmp_path}/my runs'/slurm_$SLURM_JOB_ID train.py --lr 'a b' &"
    )
    assert not (tmp_path / "my runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "2"], "--nodes was given, which is of a job of SLURM. Add --slurm"),
        (["--slurm", "--nodes", "none"], "a whole number"),
        (["--slurm", "--time", "soon"], "no time of SLURM"),
        (["--slurm", "--sbatch", "nodes=3"], "a flag of its own"),
        (["--slurm", "--sbatch", "a b"], "no option of sbatch"),
        (["--slurm", "--hosts", "a,b"], "The job's own nodes run it"),
        (["--slurm", "--num_machines", "2"], "The job's own nodes run it"),
    ],
)
def test_what_is_no_job_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words, "train.py"]) != 0
    assert message in capsys.readouterr().err


def test_a_job_with_more_nodes_than_are_used_goes_on_when_one_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "3", "--num_machines", "2", "--max_restarts", "1"]
    assert main(["launch", "--slurm", "--dry-run", *words, "train.py"]) == 0
    printed = capsys.readouterr().out
    assert "#SBATCH --no-kill\n" in printed
    assert "--max-restarts 1 --num-nodes 2 " in printed


def test_times_and_options_are_read_as_slurm_reads_them() -> None:
    times = {"1": 15, "2:00": 30, "1:00:00": 120, "1-0": 120, "0-0:02": 30, None: 120}
    assert {time: notice(time) for time in times} == times
    options = more_options(["account=lab", "--exclusive", "signal=B:USR1@9"])
    assert options == {"account": "lab", "exclusive": "", "signal": "B:USR1@9"}
    with pytest.raises(ConfigurationError, match="no time"):
        notice("1:2:3:4")


def test_without_sbatch_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(LaunchError, match="print the script with --dry-run"):
        submit("#!/bin/bash\n")


def test_an_option_of_the_request_holds_over_the_usual_one(tmp_path: Path) -> None:
    job = SlurmJob(more={"signal": "B:USR1@9"})
    script = job.script(["python"], ["train.py"], name="train", folder=tmp_path, variables={"KEY": "a b"})
    assert "--signal=B:USR1@9\n" in script
    assert "USR1@120" not in script
    assert "export KEY='a b'\n" in script


@pytest.mark.parametrize(
    ("number", "code", "requeue", "is_requeued"),
    [
        (signal.SIGUSR1, 75, True, True),
        (signal.SIGUSR1, 75, False, False),
        (signal.SIGUSR1, 1, True, False),
        (signal.SIGTERM, 75, True, False),
    ],
)
def test_the_launch_learns_the_limit_and_the_job_comes_again_where_it_has_saved(
    tmp_path: Path, number: signal.Signals, code: int, requeue: bool, is_requeued: bool
) -> None:
    launcher = tmp_path / "launcher.py"
    handler = f"import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))\n"
    launcher.write_text(handler + "print('ready', flush=True)\nsignal.pause()\n")
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "scontrol").chmod(0o755)
    command = [sys.executable, str(launcher)]
    script = SlurmJob(requeue=requeue).script(command, ["train.py"], name="train", folder=tmp_path, variables={})
    environment = {**os.environ, "SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "ready\n"
    job.send_signal(number)
    printed, _ = job.communicate(timeout=20)
    assert job.returncode == code
    assert printed == ("requeue 7\n" if is_requeued else "")
