"""Hugging Face Accelerate's own test scripts, run on this package by real ranks."""

import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

from tests.hf_suite.alias import SCRIPTS, install
from tests.ranks import run_on_ranks

LIMIT = 60.0


def run_script(
    name: str, world_size: int, folder: Path, calls: Callable[[ModuleType], None], unused: tuple[str, ...] = ()
) -> None:
    """
    `calls(script)` on each rank, where `script` is a module of theirs, and what that imports of `accelerate` is ours.

    `unused` are packages that the script imports, and that `calls` does not lead it to use: they need not be installed.
    """
    run_on_ranks(_work, world_size, name, calls, str(folder), unused, limit=LIMIT)


def _work(name: str, calls: Callable[[ModuleType], None], folder: str, unused: tuple[str, ...]) -> None:
    install()
    for package in unused:
        if find_spec(package) is None:
            sys.modules[package] = MagicMock(__spec__=ModuleSpec(package, None))
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.chdir(folder)  # some write files where they run
    with redirect_stdout(StringIO()):  # they tell of each step
        calls(import_module(f"{SCRIPTS}.scripts.{name}"))
