"""Scripts of today are run by later versions: what they call is there, and takes what it took."""

from __future__ import annotations

from importlib import import_module
from inspect import signature

import pytest

# What any released version has written into scripts. A line is added where the export writes another call; none goes.
CALLS = {
    "alike.alike": ["script.py"],
    "cells.name_in_tracebacks": ["script.py"],
    "drawing.in_the_notebook": [],
    "drawing.on_ranks": [],
    "drawing.session_begins": [],
    "files.matching": ["*.csv"],
    "files.run_file": ["prepare.py", [], {}],
    "parameters.parameters": ["__main__", "script.py", "Train"],
    "processes.needed": ["script.py"],
    "shell.capture": ["ls"],
    "shell.cd": ["data"],
    "shell.cell": ["bash", "ls"],
    "shell.expanded": ["ls {x}", {}],
    "shell.output_of": ["bash", "ls", "both"],
    "shell.pip": ["list"],
    "shell.run": ["ls"],
    "shell.set_env": ["NAME", "value"],
    "shell.write_file": ["file", "text"],
    "showing.display": [1],
    "showing.shown": [1],
    "timing.Clock": [],
    "timing.measured": ["f()", {}],
    "timing.timed": [len],
    "timing.timeit": ["f()", {}],
    "values.pull": [1],
    "values.pull_from": [0, len],
    "values.push": [1],
    "values.run": [len],
    "waiting.wait": [None],
}
NAMED = {
    "drawing.on_ranks": ["also_here"],
    "files.run_file": ["shares", "as_main", "exits", "is_module"],
    "processes.needed": ["num_processes", "cpu", "mixed_precision"],
    "shell.cd": ["quiet"],
    "shell.cell": ["fails", "background", "every"],
    "shell.output_of": ["fails"],
    "shell.pip": ["every"],
    "shell.run": ["every"],
    "shell.write_file": ["append", "every"],
    "timing.measured": ["setup", "loops", "repeat", "digits", "cpu", "quiet"],
    "timing.timeit": ["setup", "loops", "repeat", "digits", "cpu", "quiet"],
    "values.pull": ["rank", "every"],
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_script_calls_takes_what_it_is_given(name):
    home, _, called = name.partition(".")
    function = getattr(import_module(f"accelerate_nb.script.{home}"), called)
    signature(function).bind(*CALLS[name], **dict.fromkeys(NAMED.get(name, ())))


def test_options_and_clocks_have_the_methods_that_a_script_calls():
    options = import_module("accelerate_nb.script.parameters").read(["--x", "2"], "t.py", "", {"x": ("int", "1", "")})
    assert options.instead_of(1) == (2,)
    assert callable(import_module("accelerate_nb.script.timing").Clock.told)
