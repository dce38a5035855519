"""IPython's completion for the values of settings in calls of launchers, and the place of matchers of this package."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from accelerate_nb.config.run_config import all_settings
from accelerate_nb.config.value_types import Boolean

_FIRST = 1000  # of all matchers


@dataclass(frozen=True)
class ValueMatcher:
    """A matcher for the values of settings in the call of a launcher: `notebook_launcher(train, engine="` has some."""

    shell: Any

    def __call__(self, context: Any) -> dict[str, Any]:
        """The completions at the cursor."""
        above = context.full_text.split("\n")[: context.cursor_line]
        text = "\n".join([*above, context.text_until_cursor])
        argument = _ARGUMENT.search(text)
        fitting: list[str] = []
        if argument is not None:
            start = argument["start"]
            # a page that closes quotes by itself has done so already
            quote = "" if argument["quote"] else '"'
            values = self._values(argument["name"], quote, text[: argument.start()])
            # IPython replaces the token, which may hold the name and the quote, too
            kept = context.token[: max(len(context.token) - len(start), 0)]
            fitting = [f"{kept}{value}" for value in values if value.startswith(start)]
        return {
            "completions": [SimpleNamespace(text=text, type="param") for text in fitting],
            "suppress": bool(fitting),
            "ordered": True,
        }

    def _values(self, name: str, quote: str, text: str) -> list[str]:
        """The values of a setting as Python, where the innermost call that is open at the end of a text is a launcher's."""
        calls: list[str] = []
        for found in _BRACKETS.finditer(text):
            if found["open"]:
                calls.append(found["called"])
            elif found["close"] and calls:
                calls.pop()
        if not calls or not _is_launcher(calls[-1], self.shell.user_ns):
            return []
        setting = next((setting for setting in all_settings() if setting.name == name), None)
        if setting is None:
            return []
        if isinstance(setting.value_type, Boolean):
            return ["True", "False"]
        return [f"{quote}{choice}{quote}" for choice in setting.choices]


# An argument at the end of a text, of which the value has begun.
_ARGUMENT = re.compile(r"\b(?P<name>\w+)\s*=\s*(?P<quote>[\"']?)(?P<start>[\w-]*)$")
# Comments and texts, in which brackets mean nothing, and brackets with what is called by them.
_BRACKETS = re.compile(
    r"#[^\n]*|\"\"\".*?\"\"\"|'''.*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
    r"|(?P<open>(?P<called>[\w.]*)\s*[(\[{])|(?P<close>[)\]}])",
    re.DOTALL,
)


def _is_launcher(called: str, names: dict[str, Any]) -> bool:
    first, *rest = called.split(".")
    found = names.get(first)
    for name in rest:
        # of modules alone: an attribute of anything else may do something when it is read
        found = getattr(found, name, None) if isinstance(found, ModuleType) else None
    return getattr(found, "__module__", "") == "accelerate_nb.notebook.api" and hasattr(found, "__signature__")


def register_values(shell: Any) -> None:
    """Complete the values of settings in calls of launchers from now on, where the running IPython has such matchers."""
    with suppress(ImportError, AttributeError):
        add_matcher(shell, ValueMatcher(shell), "accelerate_nb.values")


def add_matcher(shell: Any, matcher: Callable[[Any], dict[str, Any]], identifier: str) -> None:
    """Have a shell complete by this matcher first, in the place of a former one of this name."""
    from IPython.core.completer import context_matcher

    remove_matcher(shell, identifier)

    # IPython sets attributes of a matcher, and reads what only a function has
    @context_matcher(priority=_FIRST, identifier=identifier)  # type: ignore[untyped-decorator]  # IPython leaves it without types
    def match(context: Any) -> dict[str, Any]:
        return matcher(context)

    shell.Completer.custom_matchers.append(match)


def remove_matcher(shell: Any, identifier: str) -> None:
    """Take the matcher of this name from a shell."""
    matchers = shell.Completer.custom_matchers
    matchers[:] = [matcher for matcher in matchers if getattr(matcher, "matcher_identifier", None) != identifier]
