"""The processes that a script of `%%accelerate` cells needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NoReturn

from accelerate_nb.config.environment import already_launched
from accelerate_nb.config.run import all_settings, resolve
from accelerate_nb.config.spelling import flags
from accelerate_nb.errors import LaunchError


def needed(file: str, **settings: Any) -> None:
    """
    Go on as one of the processes that these settings ask for.

    Under plain `python` that is a launch of this very file, with which this process ends. In a launched process the
    settings are told to its `Accelerator`, where the launcher and the environment say nothing else. A file that was
    imported does neither.

    >>> needed(__file__, num_processes=2)
    """
    frame: FrameType | None = sys._getframe(1)
    assert frame is not None
    # the children of a data loader import the script under another name
    if frame.f_globals.get("__name__") != "__main__":
        return
    if already_launched(os.environ):
        _say_where_unsaid(settings)
        _tell_of_another_size(file, settings)
        return
    _refuse_in_a_notebook(file)
    _become([sys.executable, *_interpreter_flags(), *launch_words(file, sys.argv[1:], settings)])


def launch_words(file: str, arguments: list[str], settings: Mapping[str, Any]) -> list[str]:
    """
    What follows `python` to launch a script with its arguments.

    >>> launch_words("/train.py", ["--epochs", "3"], {"num_processes": 2})
    ['-m', 'accelerate_nb', 'launch', '--num-processes', '2', '/train.py', '--epochs', '3']
    """
    return ["-m", "accelerate_nb", "launch", *flags(settings), os.path.abspath(file), *arguments]


def _say_where_unsaid(settings: Mapping[str, Any]) -> None:
    known = {one.name for one in all_settings()}
    # as in a file: whatever the environment says wins
    config = resolve({}, os.environ, {name: value for name, value in settings.items() if name in known})
    said = {**config.training.environ()}
    if "cpu" in settings:
        said |= config.launching.environ()
    for name, value in said.items():
        os.environ.setdefault(name, value)


def _tell_of_another_size(file: str, settings: Mapping[str, Any]) -> None:
    asked, size = settings.get("num_processes"), int(os.environ["WORLD_SIZE"])
    if asked not in {None, size} and os.environ["RANK"] == "0":
        print(
            f"{os.path.basename(file)}: its cells ask for {_count(asked)}, and {_count(size)} were started. "
            "What depends on their number is different.",
            file=sys.stderr,
        )


def _count(number: Any) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def _refuse_in_a_notebook(file: str) -> None:
    """`%run` in a notebook would end the kernel with the script."""
    shell = sys.modules.get("IPython")
    if shell is not None and shell.get_ipython() is not None:
        name = os.path.basename(file)
        raise LaunchError(
            f"{name} runs on several processes, and was called inside IPython, which would end with it. "
            f"Run `!accelerate-nb launch {name}` instead, or the notebook that it was exported from."
        )


def _interpreter_flags() -> list[str]:
    """What this Python was given before the script: -W, -X, -O and their like."""
    # no public function tells them; multiprocessing uses this one too
    found: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return found


def _become(words: list[str]) -> NoReturn:
    """Go on as another program, in the same process where the system can: its exit code and its signals are this one's."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if os.name == "nt":
        # there `exec` starts another process, and the shell does not wait for it
        sys.exit(subprocess.call(words))
    os.execv(words[0], words)
