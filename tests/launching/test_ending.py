"""Of many failures, the one that led to the others is found."""

from __future__ import annotations

import itertools
import signal

import pytest

from accelerate_nb.events.model import Failure
from accelerate_nb.launching.ending import cause, died


def failure(rank, time, **more):
    return Failure(rank, "E", "", "", time, **more)


@pytest.mark.parametrize(
    ("failures", "leads"),
    [
        ([failure(0, 1.0)], 0),
        ([failure(0, 2.0), failure(1, 1.0)], 1),
        ([failure(0, 1.0, lost_connection=True), failure(1, 2.0)], 1),
        ([failure(0, 1.0, ended_by_us=True), failure(1, 2.0, lost_connection=True)], 1),
        ([failure(0, 1.0, lost_connection=True), failure(1, 2.0), failure(2, 1.5, ended_by_us=True)], 1),
        ([failure(0, 2.0, lost_connection=True), failure(1, 1.0, lost_connection=True)], 1),
        (
            [
                failure(0, 1.0, exit_code=-signal.SIGABRT, last_lines=("what(): Connection closed by peer",)),
                failure(1, 2.0, exit_code=-signal.SIGKILL),
            ],
            1,
        ),
        ([failure(0, 1.0, exit_code=-signal.SIGABRT, last_lines=("assertion failed",)), failure(1, 2.0)], 0),
    ],
)
def test_the_cause_leads_in_whatever_order_failures_come(failures, leads):
    for order in itertools.permutations(failures):
        assert cause(order).rank == leads


@pytest.mark.parametrize(
    ("code", "name", "word"),
    [
        (3, "exit code 3", "it ended itself"),
        (0, "exit code 0", "before its function returned"),
        (-9, "SIGKILL", "memory"),
        (-11, "SIGSEGV", "compiled code"),
        (-6, "SIGABRT", "a signal"),
        (-63, "signal 63", "a signal"),
    ],
)
def test_a_death_names_its_code_or_signal_and_what_that_means(code, name, word):
    found = died(2, code, last_lines=["a", "b"], time=1.0, ended_by_us=False)
    assert (found.rank, found.type, found.exit_code, found.last_lines) == (2, name, code, ("a", "b"))
    assert word in found.message
