"""What is printed and logged of values that an XLA device has still to compute."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_nb import Accelerator, PartialState
from accelerate_nb.runtime.xla import device as xla


class TotalTracker:
    """A tracker that keeps what it is told before it ends."""

    name = "heard"

    def __init__(self) -> None:
        self.values: list[tuple[int | None, float]] = []
        self.is_over = False

    def start(self) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        if not self.is_over:
            self.values.append((step, float(values["total"])))

    def finish(self) -> None:
        self.is_over = True


def printed() -> dict[str, Any]:
    tracker = TotalTracker()
    accelerator = Accelerator()
    accelerator.trackers = [tracker]
    total = torch.zeros((), device=accelerator.device)
    xla.sync()
    accelerator.print("before", 1)
    counts = []
    for step in range(6):
        total += torch.ones((), device=accelerator.device) * 2
        if step in {2, 4}:
            accelerator.print("total", step, {"is": total})
            PartialState().print("and a plain line", step)
        accelerator.log({"total": total}, step=step)
        xla.sync()
        counts.append(xla.compilations())
    total += 100
    accelerator.print("last", total)
    accelerator.end_training()
    return {"counts": counts, "values": tracker.values}


@pytest.fixture(scope="module")
def run(launched_on_xla, tmp_path_factory) -> tuple[dict[str, Any], list[str]]:
    folders = set(tmp_path_factory.getbasetemp().rglob("rank_0.log"))
    result = launched_on_xla(printed)[0]
    (log,) = set(tmp_path_factory.getbasetemp().rglob("rank_0.log")) - folders
    return result, Path(log).read_text().splitlines()


def test_values_are_those_of_the_moment_in_the_order_of_the_prints(run):
    second = ["total 2 {'is': tensor(6.)}", "and a plain line 2"]
    fourth = ["total 4 {'is': tensor(10.)}", "and a plain line 4"]
    expected = ["before 1", *second, *fourth, "last tensor(112.)"]
    assert [line for line in run[1] if line in expected] == expected
    counts = run[0]["counts"]
    assert counts[1] == counts[-1], counts  # printing and logging compile nothing


def test_logged_values_reach_a_tracker_before_it_ends_and_the_record_with_their_steps(run, tmp_path_factory):
    assert run[0]["values"] == [(n, 2.0 * n + 2) for n in range(6)]
    records = tmp_path_factory.getbasetemp().rglob("metrics.jsonl")
    (record,) = [path for path in records if '"total"' in path.read_text()]
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    found = [(row["step"], row["value"]) for row in rows if row["name"] == "total"]
    assert found == [(n, 2.0 * n + 2) for n in range(6)]


def fails_after_printing(connected: bool) -> None:
    accelerator = Accelerator()
    # as on a TPU, where what was not given to the device yet may hold what comes from others
    xla.are_connected = lambda: connected  # type: ignore[assignment]
    total = torch.ones((), device=accelerator.device)
    for step in range(3):
        total = total + 1
        accelerator.print("total of step", step, total)
        if step < 2:
            xla.sync()
    accelerator.print("the last line")
    raise ValueError("after the prints")


@pytest.mark.parametrize("connected", [False, True])
def test_what_was_printed_before_a_failure_is_reported_as_far_as_it_can_be_known(on_xla, tmp_path, connected):
    with pytest.raises(ValueError, match="after the prints"):
        on_xla(fails_after_printing, connected)
    (log,) = tmp_path.rglob("rank_0.log")
    text = log.read_text()
    known = 2 if connected else 3
    assert [line for line in text.splitlines() if line.startswith("total")] == [
        f"total of step {step} tensor({step + 2}.)" for step in range(known)
    ]
    assert "the last line" in text
    assert ("Values of 1 prints and logs had not been computed yet" in text) == connected
