"""What stands behind `%%accelerate` and `%accelerate`: flags, as the settings themselves say them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from accelerate_nb.config.fields import Setting, setting, settings
from accelerate_nb.config.kinds import YesNo
from accelerate_nb.config.run import all_settings
from accelerate_nb.config.spelling import SHORT, read_words
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


def ranks_of(text: str | None, size: int) -> tuple[int, ...] | None:
    """
    The ranks that a text such as `0,2-3` names, in order; `None`, or `all`, means all.

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
    if not found or max(found) >= size:
        raise ConfigurationError(
            f"--ranks was given {text!r}, and the session has the ranks {named(range(size))}. Choose among them."
        )
    return tuple(sorted(found))


def named(ranks: Iterable[int]) -> str:
    """
    Ranks as a person writes them, the opposite of `ranks_of`.

    >>> named([0, 2, 3])
    '0,2-3'
    """
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


# ------------------------------------------------------------------------------------------------------------- reading


def _words(line: str, where: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError:
        raise ConfigurationError(f"{where} was given {line!r}, where a quotation mark is open. Close it.") from None
    comment = next((index for index, word in enumerate(words) if word.startswith("#")), len(words))
    return words[:comment]


# ----------------------------------------------------------------------------------------------------------- completing


def completions(text: str, flags: Sequence[Setting], others: Iterable[str] = ()) -> list[str]:
    """
    What can stand where a text of flags ends: flags that are not said yet, or the values of the one before.

    `others` are words that may stand there beside the flags.

    >>> completions("--mixed-precision b", session_flags())
    ['bf16']
    """
    *before, last = text.split(" ") if text else [""]
    before = [word for word in before if word]
    spelled, equals, start = last.partition("=")
    if equals:
        return [value for value in _values(spelled, flags) if value.startswith(start)]
    if before and (values := _values(before[-1], flags)) and not last.startswith("-"):
        return [value for value in values if value.startswith(last)]
    said = set(before)
    free = [one.flag for one in flags if one.flag not in said]
    words = free if last.startswith("-") else [*others, *free]
    return [word for word in words if word.startswith(last)]


def _values(spelled: str, flags: Sequence[Setting]) -> tuple[str, ...]:
    return next((one.choices for one in flags if one.flag == spelled.replace("_", "-")), ())


# ---------------------------------------------------------------------------------------------------------------- help


def help_of(flags: Iterable[Setting]) -> str:
    """A list of flags with their values, their meaning and their defaults."""
    return "\n".join(_help_lines(flags))


def _help_lines(flags: Iterable[Setting]) -> Iterator[str]:
    for one in flags:
        short = next((f"{short}, " for short, name in SHORT.items() if name == one.name), "")
        default = f" (default: {one.default})" if _is_worth_saying(one.default) else ""
        yield f"  {f'{short}{one.flag} {_placeholder(one)}'.rstrip()}"
        yield f"      {one.help}{default}"


def _placeholder(one: Setting) -> str:
    if isinstance(one.kind, YesNo):
        return ""
    return "{" + ",".join(one.choices) + "}" if one.choices else one.kind.PLACEHOLDER


def _is_worth_saying(default: Any) -> bool:
    return default not in (None, "", False) and not isinstance(default, Mapping)
