"""The command line on torch_xla's CPU backend: scripts, their functions, notebooks, and what is told of the machine."""

import json
import re
import subprocess
from pathlib import Path

import nbformat
import pytest

from tests.processes import python

# What each core computes, and whether what a rank pickles is its own.
SCRIPT = """
import argparse
import pickle
import sys

import torch
from {package} import Accelerator


class Thing:
    pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, required=True)
    options = parser.parse_args()
    accelerator = Accelerator()
    rank = accelerator.process_index
    own = torch.full((2,), float(rank)).to(accelerator.device)
    total = accelerator.reduce(own, "sum")
    accelerator.wait_for_everyone()
    total = total.cpu().tolist()
    is_own = sys.modules[__name__].Thing is Thing
    same = type(pickle.loads(pickle.dumps(Thing()))) is Thing
    print(rank, accelerator.num_processes, accelerator.device.type, total, options.lr, is_own, same, __name__)


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def process_environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch_xla computes on the CPU, and nothing of the person's is read."""
    return {"PJRT_DEVICE": "CPU", "HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def written(tmp_path: Path, package: str = "accelerate_nb") -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(package=package))
    return str(path)


def called(process_environment: dict[str, str], *words: str, devices: int = 1) -> subprocess.CompletedProcess[str]:
    done = python("-m", "accelerate_nb", *words, CPU_NUM_DEVICES=str(devices), **process_environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What ranks wrote, without the sign of the rank before it."""
    written = [re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines()]
    # two ranks of a process may write into one another's line of that
    return sorted(line for line in written if "[Gloo]" not in line and "peer ranks" not in line)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_script_runs_on_every_core_as_itself(tmp_path, process_environment, devices):
    path = written(tmp_path)
    done = called(process_environment, "launch", "--tpu", "--quiet", path, "--lr", "0.5", devices=devices)
    total = float(sum(range(devices)))
    expected = [f"{rank} {devices} xla {[total] * 2} 0.5 True True __main__" for rank in range(devices)]
    assert lines(done) == expected


@pytest.mark.slow
def test_a_script_of_accelerate_computes_as_it_is(tmp_path, process_environment):
    path = written(tmp_path, "accelerate")
    done = called(process_environment, "launch", "--tpu", "--quiet", path, "--lr", "0.5")
    assert "0 1 xla [0.0, 0.0] 0.5 True True __main__" in lines(done)


@pytest.mark.slow
def test_a_notebook_is_launched_on_a_tpu_by_accelerates_own_configuration_file(tmp_path, process_environment):
    config = tmp_path / "tpu.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: XLA\nnum_processes: 1\n")
    cell = "from accelerate_nb import Accelerator\naccelerator = Accelerator()\n"
    cell += "print(accelerator.process_index, accelerator.num_processes, accelerator.device.type)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbformat.write(notebook, tmp_path / "train.ipynb")
    words = ["launch", "--config_file", str(config), "--quiet", str(tmp_path / "train.ipynb")]
    assert lines(called(process_environment, *words, devices=2)) == ["0 2 xla", "1 2 xla"]


@pytest.mark.slow
def test_the_machine_passes_every_check(process_environment):
    done = called(process_environment, "test", "--tpu", "--json", devices=2)
    report = json.loads(done.stdout)
    assert {item["state"] for item in report["checks"]} == {"passed"}
    assert {"devices", "group", "collectives", "loader", "precision", "training"} <= {
        item["name"] for item in report["checks"]
    }


def test_the_machine_is_described(process_environment):
    facts = json.loads(called(process_environment, "env", "--json", devices=3).stdout)
    assert facts["devices"]["kind"] == "xla"
    report = facts["devices"]["xla"]
    assert (report["device"], report["count"], report["trouble"]) == ("CPU", 3, None)
    assert facts["environment"]["CPU_NUM_DEVICES"] == "3"


def test_a_dry_run_starts_nothing_and_reports_what_would_run(tmp_path, process_environment):
    path = written(tmp_path)
    output = called(process_environment, "launch", "--tpu", "--dry-run", path, devices=2).stdout
    assert "device     xla" in output
    assert "processes  2" in output
    assert "torchrun --standalone --nproc-per-node 2" in output
