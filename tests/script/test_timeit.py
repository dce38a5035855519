"""What a script says of times: the same words as IPython."""

from __future__ import annotations

import re
import time

import pytest
from IPython.core.magics import execution

from accelerate_nb.script import timeit


def test_what_was_measured_is_ipythons_own_result() -> None:
    found = timeit.measured("pass", {}, loops=1000, repeat=3, quiet=True)
    assert isinstance(found, execution.TimeitResult)
    assert (found.loops, found.repeat, len(found.all_runs)) == (1000, 3, 3)
    assert found.best == pytest.approx(min(found.timings))
    assert found.worst == pytest.approx(max(found.timings))


def test_a_timed_expression_gives_its_value_and_prints_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert timeit.timed(lambda: 6 * 7) == 42
    assert re.fullmatch(r"CPU times: user .+, sys: .+, total: .+\nWall time: .+s\n", capsys.readouterr().out)


def test_a_time_is_printed_when_an_error_ends_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), timeit.Clock():
        1 / 0  # noqa: B018
    assert "Wall time" in capsys.readouterr().out


def test_code_is_measured_as_often_as_is_requested(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    found = timeit.measured("calls.append(n)", {"calls": calls}, setup="n = 1", loops=3, repeat=2)
    assert (len(calls), found.loops, found.repeat) == (6, 3, 2)
    assert "mean ± std. dev. of 2 runs, 3 loops each" in capsys.readouterr().out
    assert timeit.timeit("pass", {}, loops=1, repeat=1, quiet=True) is None
    assert capsys.readouterr().out == ""


def test_enough_loops_are_found() -> None:
    assert timeit.measured("sleep(0.03)", {"sleep": time.sleep}, repeat=1, quiet=True).loops == 10
