"""An unknown word is answered with the nearest known one."""

from __future__ import annotations

from accelerate_nb.config.nearest import meant


def test_the_nearest_word_is_asked_for_and_none_that_is_far():
    known = iter(["--num-processes", "--num-nodes", "--cpu"])
    assert meant("--num_proceses", known) == "Did you mean --num-processes?"
    assert meant("--lr", ["--cpu"]) == ""
    assert meant("--lr", ["--cpu"], "Leave it out.") == "Leave it out."
