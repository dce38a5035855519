"""How the flags of `%%accelerate` and `%accelerate` are completed, and what their help says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from accelerate_nb.config.fields import Setting
from accelerate_nb.config.kinds import YesNo
from accelerate_nb.config.spelling import SHORT


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
