"""What can stand behind `%%accelerate` and `%accelerate`, read as the settings themselves say it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from accelerate_nb.config.fields import Setting, setting, settings
from accelerate_nb.config.nearest import meant
from accelerate_nb.config.ranks import named
from accelerate_nb.config.run import all_settings
from accelerate_nb.config.spelling import read_words
from accelerate_nb.errors import ConfigurationError

# What is said of a function that runs to its end, and means nothing to a session. `timeout` is the cell's own.
_OF_LAUNCHES = frozenset({"timeout", "results", "max_restarts", "monitor_interval"})


@dataclass(frozen=True, kw_only=True)
class CellWish:
    """What `%%accelerate` can be asked for one cell."""

    ranks: str | None = setting(None, help="The ranks that run the cell, such as 0,2-3; without it, all of them.")
    fresh: bool = setting(False, help="Start the session anew first; its variables are gone then.")
    timeout: float | None = setting(
        None, minimum=0, help="How many seconds the cell may take before it is interrupted."
    )
    background: bool = setting(False, help="Give the notebook back at once; the output goes on under the cell.")
    also_here: bool = setting(False, help="Run the cell in the notebook too, first: for imports and definitions.")
    displays: Literal["main", "all"] = setting(
        "main", help="Whose figures and tables are shown: those of the first rank ('main'), or of every rank ('all')."
    )


@dataclass(frozen=True, kw_only=True)
class PullWish:
    """What `%accelerate pull` can be asked."""

    rank: int | None = setting(None, minimum=0, help="The rank whose value is fetched; without it, the first one's.")
    all: bool = setting(False, help="Fetch every rank's value, as a list in the order of ranks.")


@dataclass(frozen=True, kw_only=True)
class LogsWish:
    """What `%accelerate logs` can be asked."""

    rank: int | None = setting(None, minimum=0, help="The rank whose lines are shown; without it, all ranks'.")
    lines: int = setting(20, minimum=1, help="How many of a rank's last lines.")


@cache
def session_flags() -> tuple[Setting, ...]:
    """The settings that a session can be started with."""
    return tuple(one for one in all_settings() if one.name not in _OF_LAUNCHES)


@cache
def cell_flags() -> tuple[Setting, ...]:
    """Everything that may stand behind `%%accelerate`."""
    return (*settings(CellWish), *session_flags())


@dataclass(frozen=True)
class Command:
    """A word behind `%accelerate`, what follows it, and what it does."""

    word: str
    usage: str
    help: str
    flags: tuple[Setting, ...] = ()


@cache
def line_commands() -> tuple[Command, ...]:
    """Everything that `%accelerate` can be told."""
    return (
        Command("status", "", "How the session is: its ranks, what they do, its settings and its folder."),
        Command("stop", "", "End the session; its variables are gone."),
        Command(
            "restart", "[flags]", "Start the session anew, with the same settings and these flags.", session_flags()
        ),
        Command("push", "x y", "Give variables of the notebook to every rank."),
        Command(
            "pull", "z", "Fetch variables of a rank into the notebook; tensors come to the CPU.", settings(PullWish)
        ),
        Command(
            "run", "fn(args)", "Call a function of the notebook on every rank; gives what it returned on the first."
        ),
        Command("wait", "", "Wait for the cell that runs in the background."),
        Command("interrupt", "", "Interrupt the cell that runs in the background; the session goes on."),
        Command("stacks", "", "Where every rank is at this moment."),
        Command("logs", "", "The last lines of the ranks, also those that no cell shows.", settings(LogsWish)),
        Command("config", "", "Pick the settings of the next session in a form."),
    )


def read_line(line: str) -> tuple[Command, str]:
    """
    The command that stands behind `%accelerate`, and the text behind its word; nothing at all asks for the status.

    >>> read_line("push x y")[1]
    'x y'
    """
    word, _, rest = line.strip().partition(" ")
    known = {one.word: one for one in line_commands()}
    if word and word not in known:
        hint = meant(word, known, "Leave it out to see the status.")
        raise ConfigurationError(f"%accelerate was given {word!r}. {hint} It knows {', '.join(known)}.")
    return known[word or "status"], rest.strip()


def read_cell_line(line: str) -> tuple[CellWish, dict[str, Any]]:
    """
    What a cell's first line asks for the cell, and what it says of the session's settings.

    `ConfigurationError` names an unknown flag's nearest, and what a value should be.

    >>> read_cell_line("-n 2 --fresh")[1]
    {'num_processes': 2}
    """
    said, rest = read(line, cell_flags(), "%%accelerate")
    refuse(rest, "%%accelerate", "It takes flags only; the code begins on the next line.")
    own = CellWish.__dataclass_fields__
    wish = CellWish(**{name: value for name, value in said.items() if name in own})
    return wish, {name: value for name, value in said.items() if name not in own}


def read(line: str, flags: Sequence[Setting], where: str) -> tuple[dict[str, Any], list[str]]:
    """The values that a line's flags say, by the names of their settings, and the words that are no flags."""
    return read_words(_words(line, where), flags, where)


def refuse(words: Sequence[str], where: str, advice: str) -> None:
    """Say that words are too many, if there are any."""
    if words:
        raise ConfigurationError(f"{where} was given {' '.join(words)!r}, which is no flag. {advice}")


def names_of(text: str, where: str) -> list[str]:
    """
    The names of variables that a text holds.

    >>> names_of("x, y", "%accelerate push")
    ['x', 'y']
    """
    names = text.replace(",", " ").split()
    wrong = next((name for name in names if not name.isidentifier()), None)
    if not names or wrong is not None:
        found = "no name" if wrong is None else repr(wrong)
        raise ConfigurationError(f"{where} was given {found}. Write names of variables, such as {where} x y.")
    return names


def ranks_of(text: str | None, size: int | None) -> tuple[int, ...] | None:
    """
    The ranks that a text such as `0,2-3` names, in order; `None`, or `all`, means all.

    `size` is how many ranks there are, where that is known.

    >>> ranks_of("0,2-3", 4)
    (0, 2, 3)
    """
    if text is None or text.strip().lower() == "all":
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            raise ConfigurationError(f"--ranks was given {text!r}. Write numbers and ranges of them, such as 0,2-3.")
        found.update(range(int(first), int(last if dash else first) + 1))
    if not found:
        raise ConfigurationError(
            f"--ranks was given {text!r}, which names none. Write the lower number of a range first."
        )
    if size is not None and max(found) >= size:
        raise ConfigurationError(
            f"--ranks was given {text!r}, and the session has the ranks {named(range(size))}. Choose among them."
        )
    return tuple(sorted(found))


# ------------------------------------------------------------------------------------------------------------- reading


def _words(line: str, where: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError:
        raise ConfigurationError(f"{where} was given {line!r}, where a quotation mark is open. Close it.") from None
    comment = next((index for index, word in enumerate(words) if word.startswith("#")), len(words))
    return words[:comment]
