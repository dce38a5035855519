"""Scripts of today are run by later versions: what they call is there, and takes what it took."""

from __future__ import annotations

from importlib import import_module
from inspect import signature

import pytest

# What any released version has written into scripts. A line is added where the export writes another call; none goes.
CALLS = {
    "shared_seed.alike": ["script.py"],
    "error_locations.name_in_tracebacks": ["script.py"],
    "rng_streams.in_the_notebook": [],
    "rng_streams.on_ranks": [],
    "rng_streams.session_begins": [],
    "ipython.cell_magic": ["sql", "", "select 1", {}],
    "ipython.line_magic": ["sql", "select 1", {}],
    "run_file.matching": ["*.csv"],
    "run_file.run_file": ["prepare.py", [], {}],
    "options.parameters": ["__main__", "script.py", "Train"],
    "relaunch.needed": ["script.py"],
    "shell_commands.capture": ["ls"],
    "shell_commands.cd": ["data"],
    "shell_commands.cell": ["bash", "ls"],
    "shell_commands.expanded": ["ls {x}", {}],
    "shell_commands.output_of": ["bash", "ls", "both"],
    "shell_commands.pip": ["list"],
    "shell_commands.run": ["ls"],
    "shell_commands.set_env": ["NAME", "value"],
    "shell_commands.write_file": ["file", "text"],
    "display.display": [1],
    "display.shown": [1],
    "timeit.Clock": [],
    "timeit.measured": ["f()", {}],
    "timeit.timed": [len],
    "timeit.timeit": ["f()", {}],
    "exchange.pull": [1],
    "exchange.pull_from": [0, len],
    "exchange.push": [1],
    "exchange.run": [len],
    "top_level_await.wait": [None],
}
NAMED = {
    "rng_streams.on_ranks": ["also_here"],
    "run_file.run_file": ["shares", "as_main", "exits", "is_module"],
    "relaunch.needed": ["num_processes", "cpu", "mixed_precision"],
    "shell_commands.cd": ["quiet"],
    "shell_commands.cell": ["fails", "background", "every"],
    "shell_commands.output_of": ["fails"],
    "shell_commands.pip": ["every"],
    "shell_commands.run": ["every"],
    "shell_commands.write_file": ["append", "every"],
    "timeit.measured": ["setup", "loops", "repeat", "digits", "cpu", "quiet"],
    "timeit.timeit": ["setup", "loops", "repeat", "digits", "cpu", "quiet"],
    "exchange.pull": ["rank", "every"],
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_script_calls_takes_what_it_is_given(name):
    home, _, called = name.partition(".")
    function = getattr(import_module(f"accelerate_nb.script.{home}"), called)
    signature(function).bind(*CALLS[name], **dict.fromkeys(NAMED.get(name, ())))


def test_options_and_clocks_have_the_methods_that_a_script_calls():
    options = import_module("accelerate_nb.script.options").read(["--x", "2"], "t.py", "", {"x": ("int", "1", "")})
    assert options.instead_of(1) == (2,)
    assert callable(import_module("accelerate_nb.script.timeit").Clock.told)
