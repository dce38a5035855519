"""When ranks start again after a failure, and why not."""

import pytest

from accelerate_nb.launching.restart_policy import LONGEST_DELAY, FailedAttempt, GiveUp, StartAgain, decide, explanation

KILLED = FailedAttempt("rank 1 ended with SIGKILL", has_stepped=True)
EARLY = FailedAttempt("rank 1 ended with SIGKILL")


def test_a_failure_after_a_step_is_restarted_until_the_restarts_are_used_up():
    assert decide([KILLED] * 3, 3, 0.5) == StartAgain(2.0)
    assert decide([KILLED] * 4, 3, 0.5) == GiveUp("max_restarts=3 is used up")


def test_the_pause_doubles_and_is_bounded():
    delays = [decide([KILLED] * count, 10_000, 0.1).delay for count in (1, 2, 3, 9, 20, 5000)]
    assert delays == [0.1, 0.2, 0.4, 25.6, LONGEST_DELAY, LONGEST_DELAY]
    assert decide([KILLED] * 5, 9, 0.0) == StartAgain(0.0)


def test_a_fifth_attempt_in_a_row_without_a_step_is_the_last():
    assert decide([EARLY], 9, 0.1) == StartAgain(0.1)
    assert decide([EARLY] * 4, 9, 0.1) == StartAgain(0.8)
    assert isinstance(decide([EARLY, KILLED, *[EARLY] * 4], 9, 0.1), StartAgain)
    assert decide([KILLED, *[EARLY] * 5], 9, 0.1) == GiveUp(
        "5 attempts in a row ended before their first optimizer step"
    )


def test_an_evaluation_of_minutes_has_got_somewhere_without_a_step():
    assert decide([FailedAttempt("lost", seconds=301)] * 5, 9, 0.1) == StartAgain(1.6)


@pytest.mark.parametrize(
    ("exceptions", "reason"),
    [
        (("SyntaxError", "Exception"), "a restart does not heal a SyntaxError: the code can't be read"),
        (
            ("ModuleNotFoundError", "ImportError", "Exception"),
            "a restart does not heal a ModuleNotFoundError: a module is missing",
        ),
        (("FileNotFoundError", "OSError"), "a restart does not heal a FileNotFoundError: a file is missing"),
        (
            ("NeedsForkError", "PayloadError", "LaunchError"),
            "a restart does not heal a NeedsForkError: something can't travel to another process",
        ),
        (("StopRequested", "KeyboardInterrupt"), "a restart does not heal a StopRequested: it was interrupted"),
    ],
)
def test_an_error_that_does_not_heal_is_not_restarted(exceptions, reason):
    attempt = FailedAttempt("", exceptions, has_stepped=True)
    assert decide([attempt], 3, 0.1) == GiveUp(reason)


@pytest.mark.parametrize("exceptions", [("ConnectionResetError", "OSError"), ("OutOfMemoryError",), ("SIGKILL",), ()])
def test_others_may_heal(exceptions):
    assert decide([FailedAttempt("", exceptions)], 1, 0.1) == StartAgain(0.1)


def test_what_a_person_ended_or_was_not_to_restart_needs_no_explanation():
    stopped, late = FailedAttempt("", was_stopped=True), FailedAttempt("", timed_out=True)
    for attempt, restarts in ((stopped, 3), (late, 3), (KILLED, 0)):
        assert decide([attempt], restarts, 0.1) == GiveUp()
        assert explanation([attempt], GiveUp()) == ""


def test_the_explanation_lists_all_attempts():
    attempts = [FailedAttempt("rank 0 failed", seconds=1.25), FailedAttempt("rank 1 failed", seconds=60)]
    assert explanation(attempts, GiveUp("max_restarts=1 is used up")).splitlines() == [
        "It was not started again: max_restarts=1 is used up.",
        "attempt 0 (1.2 s): rank 0 failed",
        "attempt 1 (60.0 s): rank 1 failed",
    ]
    assert explanation(attempts[:1], GiveUp("so")) == "It was not started again: so."
