"""What a script says of times: the same words as IPython."""

from __future__ import annotations

import re

import pytest
from IPython.core.magics import execution

from accelerate_nb.script import timing


def of_ipython(seconds: float) -> str:
    """Before IPython 9 the sign of a micro was another one that looks alike."""
    return execution._format_time(seconds).replace("\N{MICRO SIGN}", "\N{GREEK SMALL LETTER MU}")


@pytest.mark.parametrize(
    "seconds", [0.0, 1e-12, 4.2e-9, 1.59e-7, 9.996e-4, 0.5, 1.0, 59.94, 60.0, 61.5, 3723.0, 90061.0]
)
def test_a_time_reads_as_in_ipython(seconds: float) -> None:
    assert timing.duration(seconds) == of_ipython(seconds)


def test_what_was_measured_reads_as_in_ipython() -> None:
    runs = [0.2, 0.3, 0.25]
    expected = execution.TimeitResult(1000, 3, min(runs) / 1000, max(runs) / 1000, runs, 0.0, 3)
    found = timing.Timing(1000, tuple(runs))
    assert str(found) == str(expected).replace("\N{MICRO SIGN}", "\N{GREEK SMALL LETTER MU}")
    for name in ("loops", "repeat", "average", "stdev", "timings", "best", "worst"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name))


def test_a_timed_expression_gives_its_value_and_says_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert timing.timed(lambda: 6 * 7) == 42
    assert re.fullmatch(r"CPU times: user .+, sys: .+, total: .+\nWall time: .+s\n", capsys.readouterr().out)


def test_a_time_is_said_when_an_error_ends_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), timing.Clock():
        1 / 0  # noqa: B018
    assert "Wall time" in capsys.readouterr().out


def test_code_is_measured_as_often_as_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    found = timing.measured("calls.append(n)", {"calls": calls}, setup="n = 1", loops=3, repeat=2)
    assert (len(calls), found.loops, found.repeat) == (6, 3, 2)
    assert "mean ± std. dev. of 2 runs, 3 loops each" in capsys.readouterr().out
    assert timing.timeit("pass", {}, loops=1, repeat=1, quiet=True) is None
    assert capsys.readouterr().out == ""


def test_enough_loops_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_LONG_ENOUGH", 1e-5)
    assert timing.measured("sum(range(1000))", {}, repeat=1, quiet=True).loops in {1, 10, 100}
