"""An unknown word is answered with the nearest known one."""

from accelerate_nb.config.value_types import did_you_mean


def test_the_nearest_word_is_proposed_and_none_that_is_far():
    known = iter(["--num-processes", "--num-nodes", "--cpu"])
    assert did_you_mean("--num_proceses", known) == "Did you mean --num-processes?"
    assert did_you_mean("--lr", ["--cpu"]) == ""
    assert did_you_mean("--lr", ["--cpu"], "Leave it out.") == "Leave it out."
