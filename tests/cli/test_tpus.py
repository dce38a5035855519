"""The command line knows TPUs: what a launch on one is asked for, and the lines that are printed for a pod of them."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from accelerate_nb.cli.launching.request import PROG
from accelerate_nb.cli.main import main
from accelerate_nb.errors import ConfigurationError
from tests.cli.launch_requests import request_of

POD = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "XLA",
    "mixed_precision": "bf16",
    "main_training_function": "main",
    "num_processes": 8,
    "tpu_name": "mine",
    "tpu_zone": "us-central2-b",
    "tpu_use_cluster": True,
    "tpu_env": ["A=1"],
    "commands": ["ls", "pwd"],
}
GONE = "The commands in gone were requested, but that file can't be read: No such file or directory. Correct its path."


@pytest.fixture(autouse=True)
def _no_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PJRT_DEVICE", "TPU_NAME"):
        monkeypatch.delenv(name, raising=False)


def file_of(tmp_path: Path, **entries: object) -> str:
    path = tmp_path / "tpu.yaml"
    path.write_text(yaml.safe_dump({**POD, **entries}))
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The words of the one line that a command prints; beside it, a person is told that nothing was run."""
    assert main(list(words)) == 0
    output = capsys.readouterr()
    (line,) = output.out.splitlines()
    assert "nothing was" in output.err
    return shlex.split(line)


# --------------------------------------------------------------------------------------------------------- one machine


def test_tpu_is_a_launch_through_torch_xla_whatever_the_file_sets(tmp_path):
    path = file_of(tmp_path, distributed_type="NO", use_cpu=True, tpu_use_cluster=False)
    found = request_of("--tpu", "--config_file", path)
    assert (found.config.launching.engine, found.config.launching.cpu) == ("xla", False)
    assert found.on_tpus
    assert not found.is_for_a_pod


def test_a_file_for_tpus_requests_the_same_and_cpu_takes_it_back(tmp_path):
    path = file_of(tmp_path, tpu_use_cluster=False)
    assert request_of("--config_file", path).config.launching.engine == "xla"
    assert not request_of("--config_file", path, "--cpu").on_tpus


def test_an_engine_that_is_another_is_refused():
    assert request_of("--tpu", "--engine", "xla").on_tpus
    with pytest.raises(ConfigurationError, match="requests engine=xla, together with engine=local"):
        request_of("--tpu", "--engine", "local")


@pytest.mark.parametrize(
    ("words", "function"),
    [([], None), (["--main_training_function", "go"], "go"), (["--main-training-function", "main"], "main")],
)
def test_the_script_runs_where_no_function_is_named(tmp_path, words, function):
    assert request_of("--tpu", *words).function == function
    assert request_of("--tpu", *words, "--config_file", file_of(tmp_path)).function == function


def test_a_function_that_a_file_names_is_called_and_the_flag_wins(tmp_path):
    path = file_of(tmp_path, main_training_function="train")
    assert request_of("--config_file", path).function == "train"
    assert request_of("--config_file", path, "--main_training_function", "main").function == "main"
    assert request_of("--config_file", path, "--cpu").function is None


def test_workers_find_what_makes_bf16_keep_doubles(tmp_path):
    words = ["--tpu", "--mixed_precision", "bf16"]
    assert request_of(*words, "--downcast_bf16").variables["XLA_DOWNCAST_BF16"] == "1"
    assert request_of("--tpu", "--mixed_precision", "no", "--downcast_bf16").variables == {}
    yes = file_of(tmp_path, downcast_bf16="yes")
    assert request_of(*words, "--config_file", yes).variables["XLA_DOWNCAST_BF16"] == "1"
    assert request_of(*words, "--config_file", file_of(tmp_path, downcast_bf16="no")).variables == {}


def test_a_flag_of_tpus_without_one_changes_nothing_and_reports_it(capsys):
    request_of("--tpu_use_sudo", "--vm", "a", "--vm", "b").warn_of_unused_flags()
    why = "--tpu_use_sudo changes nothing: it is an option of a TPU, which --tpu requests."
    assert capsys.readouterr().err == f"{PROG}: {why}\n"
    request_of("--tpu", "--tpu_use_sudo").warn_of_unused_flags()
    assert capsys.readouterr().err == ""


# --------------------------------------------------------------------------------------------------------------- a pod


def test_a_pods_line_is_printed_and_run_by_nobody(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    words = ["--env", "B=two words", "--tpu_use_sudo", "--mixed_precision", "bf16", "train.py", "--name", "it's"]
    line = printed(capsys, "launch", "--tpu", "--tpu-name", "mine", "--tpu-zone", "us-central2-b", *words)
    assert " ".join(line[:-1]) == ("gcloud compute tpus tpu-vm ssh mine --zone us-central2-b --worker=all --command")
    assert shlex.split(line[-1]) == [
        *("sudo", "env", "B=two words", "accelerate-nb", "launch", "--tpu", "--no-tpu-cluster", "--config-file="),
        *("--mixed-precision", "bf16", "train.py", "--name", "it's"),
    ]


def test_what_a_pods_machines_run_requests_what_was_requested_here(tmp_path, capsys):
    words = ["--config_file", file_of(tmp_path, main_training_function="go", downcast_bf16="yes"), "--timeout", "9"]
    launcher = request_of(*words)
    assert launcher.is_for_a_pod
    assert not request_of(*words, "--no_tpu_cluster").is_for_a_pod
    line = printed(capsys, "launch", *words, "-m", "package.train", "x")
    environment, assignment, *command = shlex.split(line[-1])
    assert (environment, assignment, command[:2]) == ("env", "A=1", ["accelerate-nb", "launch"])
    assert command[-3:] == ["-m", "package.train", "x"]
    machine = request_of(*command[2:-3])
    assert machine.config == launcher.config
    assert machine.tpus.function == launcher.tpus.function == "go"
    assert machine.variables == launcher.variables
    assert not machine.is_for_a_pod


def test_a_shell_takes_the_line_apart_as_it_was_written(tmp_path, capsys):
    """A stand-in for gcloud tells what it was called with: no pod is at hand."""
    for name, code in (
        ("gcloud", "os.execvp('sh', ['sh', '-c', sys.argv[-1]])"),
        ("accelerate-nb", "print([os.environ['A'], *sys.argv[-2:]])"),
    ):
        (tmp_path / name).write_text(f"#!{sys.executable}\nimport os, sys\n{code}\n")
        (tmp_path / name).chmod(0o755)
    assert main(["launch", "--tpu", "--tpu_name", "mine", "--env", "A=a b$HOME", "train.py", "it's $HOME"]) == 0
    line = capsys.readouterr().out
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/"}
    written = subprocess.check_output(["sh"], input=line, env=environment, text=True, timeout=60)
    assert written == f"{['a b$HOME', 'train.py', 'it' + chr(39) + 's $HOME']}\n"


def test_a_notebook_is_launched_on_a_pod_with_its_parameters_behind_it(capsys):
    line = printed(capsys, "launch", "--tpu", "--tpu-name", "mine", "train.ipynb", "--", "--lr", "1")
    assert shlex.split(line[-1])[-4:] == ["train.ipynb", "--", "--lr", "1"]


# ---------------------------------------------------------------------------------------------------------- tpu-config


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--command", "echo one; echo two", "pwd"],
        ["--command", "one", "--command", "two"],
        ["--use_alpha", "--tpu_name", "other", "--tpu_zone", "elsewhere"],
        ["--command_file", "setup.sh"],
    ],
    ids=["file", "command", "commands", "other", "command_file"],
)
def test_it_runs_what_accelerates_own_command_would(tmp_path, capsys, words):
    from accelerate.commands.tpu import tpu_command_launcher, tpu_command_parser

    (tmp_path / "setup.sh").write_text("mkdir data\nls 'a b'\n")
    arguments = ["--config_file", file_of(tmp_path), *words, "--debug"]
    tpu_command_launcher(tpu_command_parser().parse_args(arguments))
    theirs = capsys.readouterr().out.removeprefix("Running ").strip()
    line = printed(capsys, "tpu-config", *arguments)
    assert "--worker=all" in line
    # theirs quotes nothing, and names the machines last
    assert " ".join(word for word in line if word != "--worker=all") == theirs.removesuffix(" --worker all")


def test_this_package_is_what_it_installs(capsys):
    line = printed(capsys, "tpu-config", "--tpu-name", "mine", "--install_accelerate", "--accelerate_version", "0.3.0")
    assert line[-1] == "cd /usr/share; pip install accelerate-nb==0.3.0"
    line = printed(capsys, "tpu-config", "--tpu-name", "mine", "--install_accelerate", "--command", "ls")
    assert line[-1] == "cd /usr/share; pip install -U accelerate-nb; ls"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tpu-config", "--command", "ls"], "no pod was named"),
        (["tpu-config", "--tpu_name", "mine"], "no command was given"),
        (["tpu-config", "--tpu_name", "mine", "--command_file", "gone"], GONE),
        (["tpu-config", "--tpu_name", "mine", "--command_file", "binary.sh"], "can't be read: it is no text in UTF-8."),
        (["launch", "--tpu", "--tpu_cluster", "train.py"], "no pod was named. Name it with --tpu-name"),
        (["launch", "--tpu", "--no_python", "ls"], "--no_python was given for a launch through torch_xla"),
    ],
)
def test_what_is_missing_or_can_not_be_is_named(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    Path("binary.sh").write_bytes(b"\xff")
    assert main(words) == 2
    assert message in capsys.readouterr().err
