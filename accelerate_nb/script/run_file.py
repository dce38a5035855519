"""`%run`, as scripts of earlier exports call it."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Sequence
from typing import Any


def run_file(
    path: str,
    arguments: Sequence[str],
    names: dict[str, Any],
    *,
    shares: bool = False,
    as_main: bool = True,
    exits: bool = True,
    is_module: bool = False,
) -> None:
    """
    Run a Python file, or a notebook, in this process, as `%run` does; its names are in `names` afterwards.

    With `shares` (`-i`) it sees the names that are there, as a notebook always does. Without `as_main` (`-n`) its `__name__`
    is not `"__main__"`, and without `exits` (`-e`) its `sys.exit` only ends itself. `is_module` (`-m`) takes the name of a
    module. Whatever it raises is raised here.

    >>> run_file("prepare.py", ["--small"], globals())  # doctest: +SKIP
    """
    from accelerate_nb.script.ipython import shell_of

    given = {"-i": shares, "-n": not as_main, "-e": not exits}
    file = ["-m", path, "--"] if is_module else [path]
    words = ["-G", *(flag for flag in given if given[flag]), *file, *arguments]
    with shell_of(names) as shell:
        # not by `run_line_magic`, which would look for `{name}` in the words
        shell.find_line_magic("run")(shlex.join(words))


def matching(pattern: str) -> list[str]:
    """
    The files that match a word of a command line; the word itself, if there are none.

    >>> matching("no such file *")
    ['no such file *']
    """
    expanded = os.path.expanduser(pattern)
    return sorted(glob.glob(expanded)) or [expanded]
