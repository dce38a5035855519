"""Scripts of today are run by later versions: what they call is there, and takes what it took."""

from __future__ import annotations

from importlib import import_module
from inspect import signature

import pytest

# What the export writes into scripts. A line is added where it writes another call; none goes within a release.
CALLS = {
    "shared_seed.alike": ["script.py"],
    "error_locations.name_in_tracebacks": ["script.py"],
    "options.parameters": ["__main__", "script.py", "Train"],
    "ranks.begin": ["script.py"],
    "shell.capture": ["ls"],
    "shell.cell": ["bash", "-e", "ls"],
    "shell.line": ["env", "A=1"],
    "shell.run": ["ls"],
    "display.display": [1],
    "display.shown": [1],
    "top_level_await.wait": [None],
}
NAMED = {
    "ranks.begin": ["num_processes", "cpu", "mixed_precision"],
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_script_calls_takes_what_it_is_given(name):
    home, _, called = name.partition(".")
    function = getattr(import_module(f"accelerate_nb.script.{home}"), called)
    signature(function).bind(*CALLS[name], **dict.fromkeys(NAMED.get(name, ())))


def test_options_have_the_method_that_a_script_calls():
    options = import_module("accelerate_nb.script.options").read(["--x", "2"], "t.py", "", {"x": ("int", "1", "")})
    assert options.instead_of(1) == (2,)
