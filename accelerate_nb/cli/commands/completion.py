"""`accelerate-nb completion`: what makes a shell complete these commands, their flags and their choices."""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import PurePath

_SHELLS = ("bash", "zsh", "tcsh")
_INSTALL = {
    "bash": """\
To have it in every bash from now on:
  mkdir -p ~/.local/share/bash-completion/completions
  accelerate-nb completion bash > ~/.local/share/bash-completion/completions/accelerate-nb
or, where there is no package bash-completion, add this line to ~/.bashrc:
  source <(accelerate-nb completion bash)
""",
    "zsh": """\
To have it in every zsh from now on:
  mkdir -p ~/.zfunc && accelerate-nb completion zsh > ~/.zfunc/_accelerate-nb
and in ~/.zshrc, before compinit is called:
  fpath=(~/.zfunc $fpath); autoload -Uz compinit; compinit
""",
    "tcsh": """\
To have it in every tcsh from now on:
  accelerate-nb completion tcsh > ~/.accelerate-nb.tcsh
and in ~/.tcshrc:
  source ~/.accelerate-nb.tcsh
""",
}
_EXAMPLES = """examples:
  source <(accelerate-nb completion bash)        in this bash, now
  accelerate-nb completion zsh > ~/.zfunc/_accelerate-nb
"""
# Placeholders of flags whose value is a path.
_PATHS = ("FILE", "PATH", "FOLDER", "DIR")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "Print a script that makes a shell complete these commands, their flags and their choices."
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "shell", nargs="?", choices=_SHELLS, help="The shell; without it, the one that SHELL names, or else bash."
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the script; in a terminal also print how to install it."""
    usual = PurePath(os.environ.get("SHELL", "")).name
    shell = arguments.shell or (usual if usual in _SHELLS else "bash")
    print(script(shell))
    if sys.stdout.isatty():
        print(f"\n{_INSTALL[shell]}", file=sys.stderr, end="")
    return 0


def script(shell: str) -> str:
    """The script for a shell."""
    import shtab

    from accelerate_nb.cli.main import whole

    parser = whole()
    for action in _actions(parser):
        shown = action.metavar if isinstance(action.metavar, str) else ""
        if action.choices is None and shown.startswith("{"):
            # a setting reads its own text, and shows its choices as its placeholder
            action.choices = shown.strip("{}").split(",")
        elif action.choices is None and (not action.option_strings or shown.endswith(_PATHS)):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
            # what the help leaves out, since the usage has it, can be completed all the same
            action.help = "" if action.help == argparse.SUPPRESS and not action.option_strings else action.help
    written: str = shtab.complete(parser, shell=shell)
    return written


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of every command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
        else:
            yield action
