"""Completion and help of the flags of `%%accelerate` and `%accelerate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from accelerate_nb.config.formats import SHORT
from accelerate_nb.config.settings import Setting
from accelerate_nb.config.value_types import Boolean


def completions(text: str, flags: Sequence[Setting], others: Iterable[str] = ()) -> list[str]:
    """
    The completions at the end of a text of flags: flags that are not used yet, or the values of the one before.

    `others` are further possible words.

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
    used = set(before)
    free = [flag.flag for flag in flags if flag.flag not in used]
    words = free if last.startswith("-") else [*others, *free]
    return [word for word in words if word.startswith(last)]


def _values(spelled: str, flags: Sequence[Setting]) -> tuple[str, ...]:
    return next((flag.choices for flag in flags if flag.flag == spelled.replace("_", "-")), ())


# ---------------------------------------------------------------------------------------------------------------- help


def help_of(flags: Iterable[Setting]) -> str:
    """A list of flags with their values, their meaning and their defaults."""
    return "\n".join(_help_lines(flags))


def _help_lines(flags: Iterable[Setting]) -> Iterator[str]:
    for flag in flags:
        short = next((f"{short}, " for short, name in SHORT.items() if name == flag.name), "")
        is_shown = flag.default not in (None, "", False) and not isinstance(flag.default, Mapping)
        default = f" (default: {flag.default})" if is_shown else ""
        yield f"  {f'{short}{flag.flag} {_placeholder(flag)}'.rstrip()}"
        yield f"      {flag.help}{default}"


def _placeholder(setting: Setting) -> str:
    if isinstance(setting.value_type, Boolean):
        return ""
    return "{" + ",".join(setting.choices) + "}" if setting.choices else setting.value_type.PLACEHOLDER
