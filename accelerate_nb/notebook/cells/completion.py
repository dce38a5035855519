"""IPython's completion for the lines of `%%accelerate` and `%accelerate`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from accelerate_nb.config.magic_args import cell_flags, line_commands
from accelerate_nb.notebook.cells.flags import completions
from accelerate_nb.notebook.cells.launcher_completion import add_matcher, remove_matcher
from accelerate_nb.notebook.cells.session_manager import NotebookSession

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
