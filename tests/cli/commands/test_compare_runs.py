"""`accelerate-nb runs compare`: what differs between runs is shown, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from accelerate_nb.cli.main import main
from accelerate_nb.events.model import Metric, StateChange
from accelerate_nb.events.run_folder import RunRecorder

SOURCE = "# -------- function: Cell In[{cell}]\ndef train():\n    lr = {lr}\n    return lr\n"


def keep(parent: Path, name: str, started: float, lr: float, **settings: object) -> Path:
    """A finished run of two ranks whose loss falls as fast as its learning rate says."""
    folder = parent / f"2024-01-01_{int(started):06}_{name}"
    with RunRecorder(folder) as record:
        for rank in (0, 1):
            for step in range(10):
                record.event(Metric(rank, "loss", 1 - lr * step + 0.1 * rank, step, started + step))
        record.event(StateChange(None, "finished", started + 61))
        facts = {"name": name, "why": "2 on the CPU", "state": "finished", "started": started, "ended": started + 61}
        record.status(**facts, ranks=2, settings={"num_processes": 2, "timeout": 60.0, **settings})
    (folder / "source.txt").write_text(SOURCE.format(cell=int(started), lr=lr))
    return folder


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    keep(tmp_path, "slow", 1.0, 0.05)
    keep(tmp_path, "fast", 2.0, 0.1, mixed_precision="bf16")
    return tmp_path


@pytest.fixture
def compare(parent: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run_command(*words: str) -> tuple[int, str, str]:
        code = main(["runs", "compare", *words, "--folder", str(parent)])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run_command


def test_settings_metrics_and_source_that_differ_are_shown(compare: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = compare("slow", "fast")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["mixed_precision", "default", "bf16"] in rows
    assert "timeout" not in out
    # the mean of both ranks: from 1.05 down to 1.05 - 9 * lr
    assert ["loss", "A", "0.6", "1.05", "0.6"] in rows
    assert ["B", "0.15", "1.05", "0.15", "−0.45", "(−75", "%)"] in rows
    assert "-    lr = 0.05\n+    lr = 0.1\n" in out
    assert " def train():\n" in out
    assert "✔ finished  01:01  2" in out


def test_a_run_goes_by_its_folder_too(compare: Callable[..., tuple[int, str, str]], parent: Path) -> None:
    code, out, _ = compare(str(parent / "2024-01-01_000002_fast"), "2024-01-01_000001")
    assert code == 0
    assert out.index("_fast") < out.index("_slow")


def test_cells_that_only_have_other_numbers_are_the_same(
    compare: Callable[..., tuple[int, str, str]], parent: Path
) -> None:
    keep(parent, "again", 3.0, 0.05)
    assert "The source of B is that of A." in compare("slow", "again")[1]


def test_an_unknown_run_is_answered_with_those_near_it(compare: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = compare("slow", "fats")
    assert code == 2
    assert "There is no run 'fats'" in err
    assert "fast" in err


@pytest.mark.parametrize("words", [["slow"], ["slow", "slow"]])
def test_two_different_runs_are_needed(compare: Callable[..., tuple[int, str, str]], words: list[str]) -> None:
    code, _, err = compare(*words)
    assert code == 2
    assert "Name 2 to 8 runs." in err
