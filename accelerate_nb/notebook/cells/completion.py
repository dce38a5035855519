"""Completion and help of the flags and lines of `%%accelerate` and `%accelerate`, in IPython."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from accelerate_nb.config.formats import SHORT
from accelerate_nb.config.magic_args import cell_flags, line_commands
from accelerate_nb.config.settings import Setting
from accelerate_nb.config.value_types import Boolean
from accelerate_nb.notebook.cells.launcher_completion import add_matcher, remove_matcher
from accelerate_nb.notebook.cells.session_manager import NotebookSession


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


_IDENTIFIER = "accelerate_nb"


@dataclass(frozen=True)
class MagicMatcher:
    """A matcher for IPython's completer, of its second interface: no other matcher runs where this one has a completion."""

    shell: Any
    name: str
    kept: NotebookSession

    def __call__(self, context: Any) -> dict[str, Any]:
        """The completions at the cursor."""
        found = self._found(context.text_until_cursor, first_line=context.cursor_line == 0)
        fitting = [text for text in found if text.startswith(context.token)]
        return {
            "completions": [SimpleNamespace(text=text, type="magic") for text in fitting],
            "suppress": bool(fitting),
            "ordered": True,
        }

    def _found(self, text: str, *, first_line: bool) -> list[str]:
        if first_line and (match := re.match(rf"%%{self.name}\s+(.*)", text)):
            return completions(match[1], cell_flags())
        if match := re.match(rf"(?:[^%]*=)?\s*%{self.name}\s+(.*)", text):
            return self._of_line(match[1])
        return []

    def _of_line(self, text: str) -> list[str]:
        word, space, rest = text.partition(" ")
        if not space:
            return [line_command.word for line_command in line_commands() if line_command.word.startswith(word)]
        command = next((line_command for line_command in line_commands() if line_command.word == word), None)
        # a call is Python, which IPython completes
        if command is None or command.word == "run":
            return []
        names = self._notebook_names() if command.word == "push" else []
        if command.word == "pull" and self.kept.session is not None:
            # as of the ranks' last reply
            names = list(self.kept.session.names)
        return completions(rest.lstrip(), command.flags, names)

    def _notebook_names(self) -> list[str]:
        hidden = self.shell.user_ns_hidden
        return sorted(name for name in self.shell.user_ns if not name.startswith("_") and name not in hidden)


def register(shell: Any, name: str, kept: NotebookSession) -> None:
    """Complete the lines of the magics of this name from now on."""
    add_matcher(shell, MagicMatcher(shell, name, kept), _IDENTIFIER)


def unregister(shell: Any) -> None:
    """Complete them no longer."""
    remove_matcher(shell, _IDENTIFIER)
