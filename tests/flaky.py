"""The flaky tests by name, each with its reason and its rate: pytest runs one once more where it fails, and says so."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Flaky:
    """Why a test fails at times though nothing is broken, and how often: `2 of 50 runs`."""

    reason: str
    rate: str


_ENDED = "the rank ended while its stack was asked for; why is not known yet, and the test now says how it ended"

FLAKY: dict[str, Flaky] = {
    "tests/worker/test_control_channel.py::"
    "test_stacks_of_a_rank_are_requested_as_often_as_one_likes_while_its_threads_run": Flaky(_ENDED, "1 of 15 runs"),
    "tests/failures/test_hang_report.py::"
    "test_what_ranks_wait_for_is_reported_with_their_stacks[computes_on-rank 0 waits in backward's all_reduce]": Flaky(
        _ENDED, "1 of 18 runs"
    ),
}
