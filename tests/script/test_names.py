"""Scripts of today are run by later versions: what they call is there, and takes what it took."""

from inspect import signature

import pytest

from accelerate_nb.script import options, shell

# What the export writes into scripts. A line is added where it writes another call; none goes within a release.
CALLS = {
    "start": ["script.py"],
    "parameters": ["__main__", "script.py", "Train"],
    "begin": ["script.py"],
    "capture": ["ls"],
    "cell": ["bash", "-e", "ls"],
    "line": ["env", "A=1"],
    "run": ["ls"],
    "display": [1],
    "shown": [1],
    "wait": [None],
}
NAMED = {"begin": ["num_processes", "cpu", "mixed_precision"]}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_script_calls_takes_what_it_is_given(name):
    signature(getattr(shell, name)).bind(*CALLS[name], **dict.fromkeys(NAMED.get(name, ())))


def test_options_have_the_method_that_a_script_calls():
    found = options.read(["--x", "2"], "t.py", "", {"x": ("int", "1", "")})
    assert found.instead_of(1) == (2,)
