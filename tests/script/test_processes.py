"""The processes of a launch have the same chance; a process of its own is left alone."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_nb.script.ranks import alike, can_begin_again, launch_digest

PLACE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def test_a_process_that_was_not_launched_beside_others_keeps_its_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    before = random.getstate()
    monkeypatch.delenv("RANK", raising=False)
    alike(__file__)
    for name, value in {**PLACE, "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    alike(__file__)
    assert random.getstate() == before


def test_the_number_is_one_launch_s_and_one_attempt_s() -> None:
    def of(**others: str) -> bytes:
        return launch_digest({**PLACE, "TORCHELASTIC_ERROR_FILE": "/tmp/none_x/attempt_0/0/error.json", **others})

    assert of() == of(RANK="1", TORCHELASTIC_ERROR_FILE="/tmp/none_x/attempt_0/1/error.json")
    others = [of(TORCHELASTIC_RESTART_COUNT="1"), of(MASTER_PORT="29501"), of(TORCHELASTIC_RUN_ID="b")]
    others.append(of(TORCHELASTIC_ERROR_FILE="/tmp/none_y/attempt_0/0/error.json"))
    assert len({of(), *others}) == 5
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
    for name, value in PLACE.items():
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
