"""`accelerate-nb launch` runs what is named on every process, and ends as it ended."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from accelerate_nb.cli.exit_codes import exit_code
from accelerate_nb.cli.main import main
from accelerate_nb.errors import ConfigurationError, WorkerError
from accelerate_nb.events.event_types import Failure
from tests.cli.launch_requests import read
from tests.export.making import code, notebook
from tests.processes import python

pytestmark = pytest.mark.usefixtures("folder")

TWO = ("--cpu", "-n", "2")
LR = code("lr = 0.1  # how far a step goes", "parameters")
GATHERS = """
import torch
accelerator = Accelerator()
seen = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
print(seen, accelerator.mixed_precision, accelerator.gradient_accumulation_steps, accelerator.device.type)
"""
# Scripts that know no launcher of ours, with what each of two ranks writes.
PEERS = {
    "torch": (
        """
        import argparse, torch, torch.distributed as dist
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        arguments = parser.parse_args()
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(total)
        print(dist.get_world_size(), total.item(), arguments.lr)
        dist.destroy_process_group()
        """,
        "2 3 0.5",
    ),
    "accelerate": (
        f"""from accelerate import Accelerator{GATHERS}
print(accelerator.state.dynamo_plugin.backend.value, accelerator.state.debug)
accelerator.end_training()""",
        "[0, 1] bf16 3 cpu\nEAGER True",
    ),
    "ours": (f"from accelerate_nb import Accelerator{GATHERS}", "[0, 1] bf16 3 cpu"),
    "fabric": (
        """
        import torch
        from lightning_fabric import Fabric
        fabric = Fabric(accelerator="cpu", devices=2)
        fabric.launch()
        print(fabric.all_gather(torch.tensor([fabric.global_rank])).flatten().tolist())
        """,
        "[0, 1]",
    ),
}
FAILS = """
import os, signal, sys, time

def fails(how):
    if how == "raise":
        return {}[how]
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave":
        os._exit(7)
    sys.exit(int(how) if how.isdecimal() else how)

if os.environ["RANK"] == "1":
    fails(sys.argv[1])
if sys.argv[1] != "0":
    signal.pause()
print("rank", os.environ["RANK"], "is done")
"""
WAITS = """
import os, signal, subprocess
child = subprocess.Popen(["sleep", "600"])
print("pids", os.getpid(), child.pid, flush=True)
signal.pause()
"""

GOES_ON = """
import sys
import torch
from accelerate_nb import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
print("resumed", accelerator.resume("saved"), flush=True)
while "once" not in sys.argv and not accelerator.stop_requested:
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
accelerator.save_state("saved")
print("saved", flush=True)
"""

SAVES = """
import os, signal, sys

def save(number, frame):
    print("saves", flush=True)
    open("saved_" + os.environ["RANK"], "w").close()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    signal.pause()
"""


def script(text: str, name: str = "script.py") -> str:
    """A script with this text, here."""
    Path(name).write_text(text)
    return name


def ended(words: list[str]) -> int:
    """The exit code of a command line, where a parser of its own may end it."""
    with pytest.raises(SystemExit) as end:
        raise SystemExit(main(words))
    return int(str(end.value.code))


def lines(text: str) -> list[str]:
    """Lines in an order of their own: ranks write when they like, and up to torch 2.9 gloo tells of its connections."""
    return sorted(line for line in text.splitlines() if "[Gloo] Rank" not in line)


# -------------------------------------------------------------------------------------------------------------- running


@pytest.mark.parametrize("peer", ["torch", "accelerate", "ours", pytest.param("fabric", marks=pytest.mark.slow)])
def test_code_for_any_launcher_runs_on_connected_processes(peer, capfd):
    text, written = PEERS[peer]
    words = ["--mixed_precision", "bf16", "--gradient_accumulation_steps=3", "--dynamo_backend", "eager", "--debug"]
    assert main(["launch", *TWO, *words, script(dedent(text)), "--lr", "0.5"]) == 0
    expected = [f"[{rank}] {line}" for rank in range(2) for line in written.split("\n")]
    assert lines(capfd.readouterr().out) == sorted(expected)


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("raise", 1, "rank 1 stopped with KeyError: 'raise'"),
        ("kill", 1, "rank 1 ended with SIGKILL"),
        ("3", 3, "SystemExit: 3"),
        ("words", 1, "words"),
        ("leave", 7, "rank 1 ended with exit code 7"),
        ("0", 0, "finished"),
    ],
)
def test_the_command_ends_as_its_first_cause(how, code, message, capfd):
    assert main(["launch", *TWO, script(FAILS), how]) == code
    out, err = capfd.readouterr()
    assert message in err
    assert ("[0] rank 0 is done" in out) == (how == "0")
    if how == "raise":
        # the person's own lines, and none of this package's
        assert 'script.py", line 6, in fails\n    return {}[how]' in err
        assert "accelerate_nb/" not in err
        assert err.count("KeyError") == 2


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_command_leaves_no_process_behind(number, code):
    words = [sys.executable, "-m", "accelerate_nb", "launch", *TWO, script(WAITS)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launched:
        printed = [launched.stdout.readline() for _ in range(2)]
        left = [psutil.Process(int(word)) for line in printed for word in line.split()[2:]]
        left += psutil.Process(launched.pid).children(recursive=True)
        assert len(left) >= 5
        launched.send_signal(number)
        _, err = launched.communicate(timeout=30)
    assert launched.returncode == code
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(left, timeout=10)
    # a process that nobody waits for stays known where process 1 looks after nobody
    assert [item for item in alive if item.status() != psutil.STATUS_ZOMBIE] == []


def test_the_standard_input_is_read_and_the_lines_of_one_rank_are_shown():
    reads = "import os, sys; print('read', sys.stdin.read().strip(), 'on', os.environ['RANK'])"
    words = [sys.executable, "-m", "accelerate_nb", "launch", *TWO, "--only-rank", "0", "--quiet", script(reads)]
    done = subprocess.run(words, input="words\n", capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("read words on 0\n", "")


def test_modules_and_programs_run_too(capfd):
    assert main(["launch", "--cpu", "-q", "-m", "json.tool", "--help"]) == 0
    assert capfd.readouterr().out.startswith("usage: ")
    assert main(["launch", *TWO, "--no_python", "sh", "-c", "echo $RANK of $WORLD_SIZE; exit $((RANK * 4))"]) == 4
    assert lines(capfd.readouterr().out) == ["[0] 0 of 2", "[1] 1 of 2"]


def stopped(text: str, first: str, last: str) -> int:
    """The exit code of a launch that is stopped once both ranks have written this, and then write that."""
    words = [sys.executable, "-m", "accelerate_nb", "launch", *TWO, script(text)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as launched:
        assert sorted(launched.stdout.readline() for _ in range(2)) == [f"[0] {first}\n", f"[1] {first}\n"]
        launched.send_signal(signal.SIGTERM)
        out, _ = launched.communicate(timeout=60)
    assert sorted(out.splitlines()) == [f"[0] {last}", f"[1] {last}"]
    return launched.returncode


@pytest.mark.slow
def test_a_run_that_is_stopped_saves_ends_with_a_code_of_its_own_and_goes_on_when_it_is_run_again():
    assert stopped(GOES_ON, "resumed False", "saved") == 75
    again = python("-m", "accelerate_nb", "launch", *TWO, "script.py", "once", check=True)
    assert "[0] resumed True" in again.stdout.splitlines()


@pytest.mark.slow
def test_a_program_that_handles_the_signal_saves_before_it_ends(folder):
    assert stopped(SAVES, "ready", "saves") == 143
    assert sorted(path.name for path in folder.glob("saved_*")) == ["saved_0", "saved_1"]


def test_a_module_that_is_not_in_its_package_is_named(folder, capfd):
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    assert main(["launch", "--cpu", "-m", "package.missing"]) == 1
    assert "ModuleNotFoundError: No module named 'package.missing'" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------------------ notebooks


def test_a_notebook_runs_where_it_lies_with_its_parameters(folder, capfd):
    (folder / "deep").mkdir()
    (folder / "deep" / "beside.py").write_text("HERE = 'beside'")
    # a rank that fails ends the other, which has to have written its line before
    written = "open(os.environ['RANK'], 'w').close()\nwhile not os.path.exists('0') or not os.path.exists('1'): pass"
    prints = f"print(os.getcwd(), HERE, lr, epochs, flush=True)\n{written}"
    cells = ["import os, sys\nfrom beside import HERE", prints, "print(missing[lr])"]
    notebook(Path("deep/train.ipynb"), code("lr = 0.1  # how far\nepochs = 3", "parameters"), *cells)
    assert main(["launch", "deep/train.ipynb", *TWO, "--", "--lr", "0.5"]) == 1
    out, err = capfd.readouterr()
    assert lines(out) == [f"[{rank}] {folder / 'deep'} beside 0.5 3" for rank in range(2)]
    assert "train.ipynb failed" in err
    assert "train.ipynb, cell 4, line 1" in err
    assert "name 'missing' is not defined" in err
    assert err.count("Traceback") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "--lrr", "1"], "there is no option --lrr. Did you mean --lr?"),
        (["--", "--lr", "much"], "'much' was given, and it takes a number"),
        (["--lr", "1"], "Arguments for train.ipynb itself go after `--`"),
        (["more"], "accelerate-nb launch train.ipynb -- more"),
    ],
)
def test_wrong_parameters_are_reported_before_any_process_starts(words, message, folder, capsys):
    notebook(Path("train.ipynb"), LR, "print(lr)")
    assert ended(["launch", "train.ipynb", *TWO, *words]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_the_help_of_a_notebook_lists_its_parameters(capsys):
    notebook(Path("train.ipynb"), LR, "print(lr)")
    assert main(["launch", "train.ipynb", "--help"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("usage: accelerate-nb launch")
    assert output.endswith("parameters of train.ipynb, after `--`:\n  --lr float  how far a step goes (default: 0.1)\n")
    assert main(["launch", str(notebook(Path("none.ipynb"), "1")), "-h"]) == 0
    assert "none.ipynb has no parameters" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "No program was given"),
        (["scrpt.py"], 2, "Did you mean script.py?"),
        (["json"], 2, "run it with -m json"),
        (["/dev"], 2, "/dev was to be run, and is a folder without a __main__.py. Name a script in it."),
        (["-"], 2, "- was to be run, which is no file that every process can read. Save the script in a file"),
        (["/dev/stdin"], 2, "/dev/stdin was to be run, which is no file that every process can read."),
        (["pipe"], 2, "pipe was to be run, which is no file that every process can read."),
        (["-m", "no_such_module"], 2, "there is no module no_such_module"),
        (["-m", "script.py"], 2, "that is a path, not a module's name. Leave -m out."),
        (["-m", "./script.py"], 2, "that is a path, not a module's name. Leave -m out."),
        (["--folder", "/dev/null/runs", "script.py"], 1, "no folder can be made there: Not a directory. Name another"),
        (["--no_python", "no_such_program"], 2, "there is no such program"),
        (["-m", "--no_python", "x"], 2, "-m and --no_python were both given"),
        (["broken.py"], 1, "SyntaxError: '(' was never closed"),
        (["none.ipynb"], 2, "no such file"),
        (["--only-rank", "x", "script.py"], 2, "should be ranks, such as 0 or 0,2"),
        ([*TWO, "--only-rank", "2", "script.py"], 2, "there are only ranks 0 to 1"),
        (["--engine", "inline", "-n", "2", "script.py"], 1, "this process is only one"),
        (["--num-proceses", "2", "script.py"], 2, "Did you mean --num-processes?"),
        (["--gpu_ids", "0,999", "script.py"], 1, "gpu_ids='0,999' was requested, but "),
        (["--config_file", "/", "script.py"], 2, "The configuration file / was requested, and is a folder."),
        (["--config_file", "none.yaml", "script.py"], 2, "none.yaml was requested, and does not exist"),
    ],
)
def test_what_can_not_be_run_is_reported_before_any_process_starts(words, code, message, folder, capsys):
    script("print('ran')")
    script("print('never'", "broken.py")
    os.mkfifo("pipe")
    assert main(["launch", *words]) == code
    out, err = capsys.readouterr()
    assert message in err
    assert "ran" not in out
    assert not any(path.name == "rank_0.log" for path in folder.rglob("*"))


@pytest.mark.parametrize("words", [["--num_processes", "2", "my train.py"], ["train.py"], ["train.ipynb", "-n", "2"]])
def test_a_launch_without_its_word_prints_the_whole_line(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(f": {shlex.join(['accelerate-nb', 'launch', *words])}\n")


def test_a_worker_launches_nothing(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["launch", script("1")]) == 1
    assert "inside rank 1 of 2" in capsys.readouterr().err


def test_nothing_is_reported_that_was_not_set():
    request, what = read("script.py", "--cpu")
    assert request.settings == {}
    assert request.theirs.values == {}
    assert what == ["script.py", "--cpu"]


def test_a_range_of_machines_is_the_fewest_and_the_most():
    request, what = read("--num_machines", "1:2", "--hosts", "a:2,b:2", "--max_restarts", "3", "train.py")
    assert what == ["train.py"]
    launching = request.config.launching
    assert (launching.min_nodes, launching.num_nodes, launching.max_restarts) == (1, 2, 3)
    with pytest.raises(ConfigurationError, match=r"--num_machines was given 'two', .*the fewest and the most"):
        read("--num_machines", "two", "train.py")


def test_quiet_alone_prints_less_and_with_a_number_is_the_setting():
    request, what = read("--quiet", "train.py")
    assert (request.quiet, request.settings, what) == (True, {}, ["train.py"])
    request, what = read("--quiet", "30", "--cpu", "train.py", "--quiet", "5")
    assert (request.quiet, request.settings) == (False, {"cpu": True, "hang_warning_after": 30.0})
    assert what == ["train.py", "--quiet", "5"]
    assert read("--quiet-seconds", "0", "train.py")[0].config.launching.hang_warning_after == 0


@pytest.mark.parametrize(
    ("failures", "code"),
    [
        ([{"type": "SystemExit", "message": "-1"}], 255),
        ([{"type": "SystemExit", "message": "a text"}], 1),
        ([{"type": "exit code 0", "exit_code": 0}], 0),
        ([{"type": "exit code 0", "exit_code": 0}, {"type": "SIGKILL", "exit_code": -9, "ended_by_us": True}], 1),
        ([{"type": "ValueError"}], 1),
        ([], 1),
    ],
)
def test_the_exit_code_is_the_first_causes(failures, code):
    error = WorkerError()
    error.rank = 0
    plain = {"message": "", "traceback": "", "time": 0.0}
    error.failures = tuple(Failure(**{"rank": rank, **plain, **fields}) for rank, fields in enumerate(failures))
    assert exit_code(error) == code


@pytest.mark.slow
def test_waiting_for_processes_loads_no_torch():
    code = "import sys; from accelerate_nb.cli.main import main\nassert main(['launch', '--cpu', '-q', 'script.py']) == 0\n"
    code += "assert not {'torch', 'numpy', 'IPython'} & set(sys.modules)"
    script("import torch; print(torch.ones(1).item())")
    assert python("-c", code, check=True).stdout == "1.0\n"
