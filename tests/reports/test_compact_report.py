"""The report for notebooks in git: small, without scripts, and the same where the runs were the same."""

from __future__ import annotations

import difflib
from dataclasses import replace

from accelerate_nb.events.model import LogLine, Metric
from accelerate_nb.reports.compact_report import compact
from tests.reports import stories


def report_of(view, facts=None):
    return compact(facts or stories.facts(), view, "accelerate-nb-1")


def test_it_is_small_and_has_the_charts_the_error_and_the_last_lines():
    view = stories.failed()
    view.apply(LogLine(0, "stdout", "a last line", stories.STARTED + 40))
    made = report_of(view)
    assert sum(map(len, made.values())) < 15_000
    assert "<script" not in made["text/html"]
    assert "<img" in made["text/html"]
    for text in made.values():
        assert "ValueError" in text
        assert "a last line" in text


def test_where_one_value_differs_few_lines_do():
    def lines(last):
        view = stories.training(2)
        view.apply(Metric(0, "loss", last, 300, stories.STARTED + 30))
        return report_of(stories.end(view))["text/html"].splitlines()

    same = [*difflib.unified_diff(lines(0.5), lines(0.5), n=0, lineterm="")]
    other = [line for line in difflib.unified_diff(lines(0.5), lines(0.25), n=0, lineterm="") if line[0] == "+"]
    assert same == []
    assert len(other) < len(lines(0.5)) / 5


def test_where_a_run_was_kept_is_not_in_it():
    elsewhere = replace(stories.facts(), folder="/elsewhere/a_run")
    assert report_of(stories.failed(), elsewhere) == report_of(stories.failed())
