"""Of many failures, the one that led to the others is found."""

from __future__ import annotations

import itertools
import signal

import pytest

from accelerate_nb.events.model import Failure, cause


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
