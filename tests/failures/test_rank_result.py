"""A worker that died without a word: what its end says."""

import pytest

from accelerate_nb.failures.rank_result import death_failure


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
    found = death_failure(2, code, last_lines=["a", "b"], time=1.0, ended_by_us=False)
    assert (found.rank, found.type, found.exit_code, found.last_lines) == (2, name, code, ("a", "b"))
    assert word in found.message
