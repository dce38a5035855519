"""The report that a notebook keeps: its size, and the panel that its script draws."""

from __future__ import annotations

import gzip
import json
import random
import re
from typing import Any

from accelerate_nb.events.model import (
    LogLine,
    Metric,
    ProfiledOperation,
    StepProfile,
)
from accelerate_nb.events.run_state import RunState
from accelerate_nb.notebook.display.saved_report import bundle
from accelerate_nb.reports.size_limits import saved_size
from tests.reports import stories

DIGITS = " !#$%'()*+,-./0123456789:;=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_`abcdefghijklmnopqrstuvwxyz{|}~"


def report(view: RunState, *, with_code: bool = True) -> dict[str, str]:
    return bundle(stories.facts(size=len(view.ranks)), view, live=False, interactive=True, with_code=with_code)


def size(data: dict[str, str]) -> int:
    return sum(map(saved_size, data.values()))


def unpacked(data: dict[str, str], name: str = "packed") -> str:
    found = re.search(rf'{name}="([^"]+)"', data["text/html"])
    assert found
    text = found[1]
    pairs = zip(text[::2], f"{text[1::2]} ", strict=False)
    bits = "".join(f"{DIGITS.index(low) + 91 * DIGITS.index(high):013b}" for low, high in [*pairs][::-1])
    return gzip.decompress(int(bits, 2).to_bytes(len(bits) // 8 + 1, "little")[: len(text) * 13 // 16]).decode()


def panel_of(data: dict[str, str]) -> dict[str, Any]:
    (message,) = json.loads(unpacked(data))
    return dict(message)


def usual() -> RunState:
    """Two ranks that log three noisy numbers in each of 300 steps, a line in each tenth, and are profiled."""
    noise = random.Random(0)
    view = stories.training(2, steps=0)
    for step in range(300):
        time = stories.STARTED + 1 + step / 10 + noise.random() / 100
        for rank in range(2):
            for name, height in (("loss", 2.3), ("accuracy", 0.5), ("speed/step_time_s", 0.025)):
                view.apply(Metric(rank, name, height * (1 + noise.random() / 10), step, time))
            if step % 10 == 0:
                view.apply(LogLine(rank, "stdout", f"step {step} loss {noise.random():.4f}", time))
    for rank in range(2):
        rows = (
            ProfiledOperation(f"aten::operation_{i}", 100 - i, 0.05 / (i + 1), 0.3 / (i + 1), "cpu") for i in range(10)
        )
        view.apply(
            StepProfile(rank, 1, 10, 0.25, (*rows,), f"/runs/train/profile_1_rank_{rank}.json.gz", stories.STARTED)
        )
    return stories.end(view)


def test_the_report_of_a_usual_run_takes_less_than_64_kb_with_the_code_and_20_without() -> None:
    view = usual()
    assert size(report(view)) < 64_000
    assert size(report(view, with_code=False)) < 20_000


def test_the_panel_of_a_saved_report_holds_the_same_run() -> None:
    made = report(stories.failed())
    code, style = unpacked(made, "code").split("\0")
    assert "function mount(" in code
    assert ".anb{" in style
    message = panel_of(made)
    assert message["reset"]
    assert message["run"]["can_act"] is False
    assert message["failure"]["rank"] == 1
    assert len(message["lines"]) == 121


def test_numbers_are_saved_with_six_digits_as_differences_and_others_as_they_are() -> None:
    view = RunState(1)
    for step, (value, odd) in enumerate([(0.12345678, 1.0), (250.0, float("nan")), (-3.5e-5, 1e300)]):
        view.apply(Metric(0, "a", value, 10 * step, stories.STARTED + step / 8))
        view.apply(Metric(0, "b", odd, step, stories.STARTED))
    message = panel_of(report(stories.end(view)))
    began = round(stories.STARTED * 100)
    assert message["columns"] == [
        [["a", 0]],
        [6],
        [[0, 10, 10]],
        [[123457, 249876543, -250000035]],
        [[began, 12, 13]],
    ]
    assert message["metrics"] == [
        ["b", 0, [[0, 1.0, stories.STARTED], [1, "nan", stories.STARTED], [2, 1e300, stories.STARTED]]]
    ]


def test_a_report_that_uses_the_code_of_another_one_is_less_than_half_as_long() -> None:
    view = stories.failed()
    whole, short = report(view), report(view, with_code=False)
    assert 'code="";' in short["text/html"]
    assert panel_of(short) == panel_of(whole)
    assert size(short) < size(whole) / 2


def test_of_a_flood_the_panel_keeps_the_newest_lines_and_counts_the_others() -> None:
    text = random.Random(1).randbytes(2000).hex()
    lines = (LogLine(number % 4, "stdout", f"{number} {text}", float(number)) for number in range(4000))
    message = panel_of(report(stories.end(stories.view_of(*lines, size=4))))
    assert 0 < len(message["lines"]) < 1000
    assert message["lines"][-1][2].startswith("3999 ")
    assert message["skipped"] == 4000 - len(message["lines"])


def test_the_same_run_is_saved_as_the_same_bytes() -> None:
    view = stories.failed()
    assert report(view) == report(view)
