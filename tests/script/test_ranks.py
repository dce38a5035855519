"""A script of `%%accelerate` cells finds the processes that it needs, however it is started."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from accelerate_nb.config.formats import read_words
from accelerate_nb.config.run_config import all_settings, resolve
from accelerate_nb.errors import ConfigurationError, LaunchError
from accelerate_nb.script import ranks
from accelerate_nb.script.ranks import ScriptRanks, alike, begin, can_begin_again, launch_digest
from tests.export.making import exported
from tests.processes import TORCHRUN, python

PLACE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An environment as a launcher gives it to the first of two processes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")} | PLACE
    # no other process is there to connect with
    monkeypatch.setattr(ScriptRanks, "open", lambda self: ranks._current.set(None))
    with patch.dict(os.environ, environment, clear=True):
        yield monkeypatch


def as_script(text: str, name: str = "__main__") -> None:
    """Run a line as a script would."""
    exec(text, {"__name__": name, "__file__": "train.py", "begin": begin})


def test_a_launched_process_receives_what_nobody_else_set(launched: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="mixed_precision"):
        as_script("begin(__file__, mixed_precision='bf17')")
    launched.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    as_script("begin(__file__, cpu=True, mixed_precision='bf16', gradient_accumulation_steps=4)")
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert os.environ["ACCELERATE_USE_CPU"] == "true"
    assert os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "8"
    before = dict(os.environ)
    as_script("begin(__file__)")
    assert dict(os.environ) == before


def test_another_world_size_is_reported_once(launched: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    as_script("begin(__file__, num_processes=2)")
    assert capsys.readouterr().err == ""
    as_script("begin(__file__, num_processes=4)")
    assert "train.py: its cells request 4 processes, but 2 processes were started." in capsys.readouterr().err
    launched.setenv("RANK", "1")
    as_script("begin(__file__, num_processes=4)")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["__mp_main__", "train"])
def test_a_script_that_is_imported_launches_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    as_script("begin(__file__, num_processes=2)", name)


SETTINGS = {"num_processes": 2, "cpu": True, "mixed_precision": "bf16", "folder": "my runs"}
SCRIPT = f"""
import sys
print("before")
sys.executable = "./telling"
from accelerate_nb.script.ranks import begin
begin(__file__, **{SETTINGS})
raise SystemExit("not reached")
"""
# What stands in for Python: it tells how it was called, and ends with a code of its own.
TELLING = '#!/bin/sh\necho $$\nfor word; do echo "$word"; done\nexit 7\n'


def test_plain_python_becomes_the_launch_with_its_flags_and_ends_with_its_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "telling").write_text(TELLING)
    (tmp_path / "telling").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in PLACE}
    words = [sys.executable, "-O", "-W", "ignore", "-X", "dev", "train.py", "--num-processes", "9"]
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=60)
    first, pid, *words = out.splitlines()
    assert process.returncode == 7
    assert first == "before"
    assert pid == str(process.pid)
    begin, script = words.index("accelerate_nb"), words.index(str(tmp_path / "train.py"))
    # the environment may say more of this kind
    assert {"-O", "-Wignore", "-X", "dev"} <= set(words[:begin])
    assert words[begin - 1 : begin + 2] == ["-m", "accelerate_nb", "launch"]
    values, others = read_words(words[begin + 2 : script], all_settings(), "A command line")
    assert (resolve(values, {}), others) == (resolve(SETTINGS, {}), [])
    assert words[script + 1 :] == ["--num-processes", "9"]


def test_a_notebook_that_runs_the_script_keeps_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(os, "execv", lambda _, words: pytest.fail(f"it became {words}"))
    InteractiveShell.instance()
    try:
        with pytest.raises(LaunchError, match=r"accelerate-nb launch train\.py"):
            as_script("begin(__file__, num_processes=2)")
    finally:
        InteractiveShell.clear_instance()


def on_two_ranks(folder: Path, *cells: str) -> subprocess.CompletedProcess[str]:
    """A notebook's script under torchrun."""
    words = [*TORCHRUN, "--redirects", "0", exported(folder, *cells)]
    return python(*words, folder=folder, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")


CELLS = [
    "import torch\nfrom accelerate_nb import notebook_launcher\nclass Kept:\n    def __init__(self, value):\n        self.value = value",
    "%%accelerate -n 2\nimport torch\nclass Made: ...\nrank_names = sorted(name for name in globals() if name[0] != '_')",
    "kept, x = Kept([1]), 3\n%accelerate push kept x",
    "%%accelerate\nkept.value.append(rank)\nx = rank\nweight = torch.nn.Linear(2, 1)(torch.ones(2)) * (rank + 1)\nmade = Made()",
    "(kept.value, x)",
    "%accelerate pull kept --rank 1\n%accelerate pull x --all\n%accelerate pull weight made rank_names\n(type(kept) is Kept, kept.value, x, weight.requires_grad, type(made).__name__, 'torch' in rank_names, 'Kept' in rank_names)",
    "%%accelerate --ranks 1\nonly = 5",
    "%accelerate pull only --rank 1\ntry:\n    %accelerate pull only\nexcept Exception as error:\n    print(type(error).__name__, error)",
    "def called(values, more):\n    values.append(more)\n    return values\nlist_ = [1]\nfound = %accelerate run called(list_, more=x)\n(found, list_, only)",
    "%%accelerate --local\nboth = 'rank' in globals()",
    "both",
    "def train(step):\n    from accelerate_nb import Accelerator\n    return Accelerator().reduce(torch.ones(1) * step, 'sum').item()\nnotebook_launcher(train, (x[1],), num_processes=2)",
    "%%accelerate\nimport asyncio\nawait asyncio.sleep(0)\n!echo {rank} > file_of_{rank}\naccelerator.wait_for_everyone()",
    "import os\nsorted(name for name in os.listdir() if name.startswith('file_of_'))",
]


@pytest.mark.slow
def test_the_notebook_and_the_ranks_have_names_of_their_own_and_give_each_other_copies(tmp_path: Path) -> None:
    done = on_two_ranks(tmp_path, *CELLS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "([1], 3)",
        "(True, [1, 1], [0, 1], False, 'Made', True, False)",
        "OperationError Rank 0 was to send only, but could not: KeyError: 'only'.",
        "([1, [0, 1]], [1], 5)",
        "False",
        "2.0",
        "['file_of_0', 'file_of_1']",
    ]


@pytest.mark.slow
def test_a_cell_that_fails_on_one_rank_names_itself_and_ends_the_script(tmp_path: Path) -> None:
    cell = "%%accelerate -n 2\n\nif rank == 1:\n    1 / 0\naccelerator.wait_for_everyone()"
    done = on_two_ranks(tmp_path, "x = 1", cell, "print('never')\n%accelerate push x")
    assert done.returncode == 1
    assert "train.ipynb, cell 2, line 4, in <module>" in done.stderr
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.slow
def test_a_script_that_is_left_early_ends_the_ranks(tmp_path: Path) -> None:
    done = on_two_ranks(tmp_path, "%%accelerate -n 2\nprint('begun')", "import sys\nsys.exit(0)", "print('never')")
    # two processes write to one pipe: the end of a line may come after the other's text
    assert (done.returncode, done.stdout.replace("\n", "")) == (0, "begunbegun"), done.stderr


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def test_a_process_that_was_not_launched_beside_others_keeps_its_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    before = random.getstate()
    monkeypatch.delenv("RANK", raising=False)
    alike(__file__)
    for name, value in {**LAUNCHED, "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    alike(__file__)
    assert random.getstate() == before


def test_the_number_is_one_launch_s_and_one_attempt_s() -> None:
    def of(**others: str) -> bytes:
        return launch_digest({**LAUNCHED, "TORCHELASTIC_ERROR_FILE": "/tmp/none_x/attempt_0/0/error.json", **others})

    assert of() == of(RANK="1", TORCHELASTIC_ERROR_FILE="/tmp/none_x/attempt_0/1/error.json")
    others = {of(TORCHELASTIC_RESTART_COUNT="1"), of(MASTER_PORT="29501"), of(TORCHELASTIC_RUN_ID="b")}
    assert len({of(), *others, of(TORCHELASTIC_ERROR_FILE="/tmp/none_y/attempt_0/0/error.json")}) == 5
    # machines have folders of their own
    assert of(WORLD_SIZE="4") == of(WORLD_SIZE="4", TORCHELASTIC_ERROR_FILE="/tmp/none_y/attempt_0/0/error.json")


FLAGS = ["", "-u -B -W ignore -Xdev -X faulthandler --check-hash-based-pycs never", "-Bu -bX dev"]
OTHERS = ["-m pdb", "-um train", "-c pass", "/bin/coverage run", "-m accelerate_nb launch"]


def test_only_a_python_that_runs_the_file_itself_can_begin_again() -> None:
    lines = {f"python {flags} train.py --lr 1": True for flags in FLAGS}
    lines |= {f"python {words} train.py --lr 1": False for words in OTHERS}
    lines |= {"python other.py --lr 1": False, "python": False}
    arguments = ["train.py", "--lr", "1"]
    assert {line: can_begin_again("train.py", line.split(), arguments) for line in lines} == lines


PROGRAM = """
import os, sys, importlib.util
from accelerate_nb.script.ranks import alike
print("begun")
alike(__file__)
assert not {"numpy", "torch"} & set(sys.modules)
importlib.util.find_spec("torch")
import random
random.random()
alike(__file__)  # a script within the script
import numpy as np, torch
print(os.getpid(), sys.argv, sys.flags.optimize, hash("text"), random.random(), np.random.rand(), torch.rand(1).item())
assert "exec_module" not in vars(torch.__spec__.loader)
"""


@pytest.mark.slow
def test_a_python_begins_again_once_in_place_with_its_words_and_seeds_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-O", "train.py", "a b"]
    processes = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [lines[:-1] for lines in outputs] == [["begun", "begun"]] * 2
    (pid, _, first), (other_pid, _, second) = (lines[-1].partition(" ") for lines in outputs)
    assert [int(pid), int(other_pid)] == [process.pid for process in processes]
    assert first.startswith("['train.py', 'a b'] 1 ")
    assert first == second
