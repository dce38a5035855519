"""A line that draws a bar is told from one that only waits for its end."""

from __future__ import annotations

import io

import pytest
from tqdm import tqdm

from accelerate_nb.events.model import LogLine, Progress
from accelerate_nb.events.terminal_lines import draws_a_bar

BAR = Progress(0, "progress", 1, 3, 0.0)


def line(text, rank=0, open=True):
    return LogLine(rank, "stderr", text, 0.0, open)


@pytest.mark.parametrize(
    "given",
    [
        {"total": 10},
        {"total": 10, "desc": "epoch 1"},
        {"total": 10, "postfix": {"loss": 0.5}},
        {"total": 10, "ncols": 40, "ascii": True},
        {"total": 10**7, "unit": "B", "unit_scale": True},
        {},
        {"desc": "read", "unit": "file", "initial": 1000, "unit_scale": True},
    ],
)
@pytest.mark.parametrize("elapsed", [0, 3, 100_000])
def test_what_tqdm_draws_is_a_bar(given, elapsed):
    bar = tqdm(file=io.StringIO(), **given)
    bar.update(4)
    bar.start_t -= elapsed
    assert draws_a_bar(line(str(bar)), [BAR])
    bar.close()


@pytest.mark.parametrize("text", ["What next? ", "loading [ok]", "50% done", "step 3/10", "[rank 0] 3 [a, b]", ""])
def test_other_open_lines_are_none(text):
    assert not draws_a_bar(line(text), [BAR])


def test_a_bar_that_is_not_known_is_a_line():
    text = "40%|####  | 4/10 [00:01<00:02, 3.1it/s]"
    assert draws_a_bar(line(text), [BAR])
    assert not draws_a_bar(line(text), [])
    assert not draws_a_bar(line(text, rank=1), [BAR])
    assert not draws_a_bar(line(text, open=False), [BAR])
