"""The processes that a script of `%%accelerate` cells needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NoReturn

from accelerate_nb.config.environment import already_launched
from accelerate_nb.config.formats import flags
from accelerate_nb.config.run_config import all_settings, resolve
from accelerate_nb.errors import LaunchError


def needed(file: str, **settings: Any) -> None:
    """
    Continue as one of the processes that these settings request.

    Under plain `python` that is a launch of this very file, with which this process ends. In a launched process the
    settings reach its `Accelerator`, where the launcher and the environment set nothing else. A file that was
    imported does neither.

    >>> needed(__file__, num_processes=2)
    """
    frame: FrameType | None = sys._getframe(1)
    assert frame is not None
    # the children of a data loader import the script under another name
    if frame.f_globals.get("__name__") != "__main__":
        return
    if already_launched(os.environ):
        _set_missing_variables(settings)
        _warn_of_another_size(file, settings)
        return
    _refuse_in_a_notebook(file)
    _become([sys.executable, *_interpreter_flags(), *launch_words(file, sys.argv[1:], settings)])


def launch_words(file: str, arguments: list[str], settings: Mapping[str, Any]) -> list[str]:
    """
    The arguments after `python` to launch a script with its own arguments.

    >>> launch_words("/train.py", ["--epochs", "3"], {"num_processes": 2})
    ['-m', 'accelerate_nb', 'launch', '--num-processes', '2', '/train.py', '--epochs', '3']
    """
    return ["-m", "accelerate_nb", "launch", *flags(settings), os.path.abspath(file), *arguments]


def _set_missing_variables(settings: Mapping[str, Any]) -> None:
    known = {setting.name for setting in all_settings()}
    # as in a file: the environment wins
    config = resolve({}, os.environ, {name: value for name, value in settings.items() if name in known})
    variables = {**config.training.environ()}
    if "cpu" in settings:
        variables |= config.launching.environ()
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _warn_of_another_size(file: str, settings: Mapping[str, Any]) -> None:
    requested, size = settings.get("num_processes"), int(os.environ["WORLD_SIZE"])
    if requested not in {None, size} and os.environ["RANK"] == "0":
        print(
            f"{os.path.basename(file)}: its cells request {_count(requested)}, but {_count(size)} were started. "
            "Results that depend on their number differ.",
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
    """The options of this Python before the script: -W, -X, -O and their like."""
    # no public function returns them; multiprocessing uses this one too
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
