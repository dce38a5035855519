"""Completion in IPython: flags of `%%accelerate` and `%accelerate`, with their help, and values of settings in calls of launchers."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from accelerate_nb.config.formats import SHORT
from accelerate_nb.config.magic_args import cell_flags, line_commands
from accelerate_nb.config.run_config import all_settings
from accelerate_nb.config.settings import Setting
from accelerate_nb.config.value_types import Boolean

_IDENTIFIER = "accelerate_nb"
_FIRST = 1000  # of all matchers


def _reply(texts: Iterable[str], kind: str) -> dict[str, Any]:
    """Completions as IPython's second interface has them: no other matcher runs where there is one."""
    completions = [SimpleNamespace(text=text, type=kind) for text in texts]
    return {"completions": completions, "suppress": bool(completions), "ordered": True}


def completions(text: str, flags: Sequence[Setting], others: Iterable[str] = ()) -> list[str]:
    """The completions at the end of a text of flags: flags not used yet and `others`, or the values of the flag before."""
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
    lines = []
    for flag in flags:
        short = next((f"{short}, " for short, name in SHORT.items() if name == flag.name), "")
        is_shown = flag.default not in (None, "", False) and not isinstance(flag.default, Mapping)
        default = f" (default: {flag.default})" if is_shown else ""
        placeholder = "{" + ",".join(flag.choices) + "}" if flag.choices else flag.value_type.PLACEHOLDER
        value = "" if isinstance(flag.value_type, Boolean) else placeholder
        lines += [f"  {f'{short}{flag.flag} {value}'.rstrip()}", f"      {flag.help}{default}"]
    return "\n".join(lines)


def _in_magic(context: Any, shell: Any, magic: str, names: Callable[[], Iterable[str]]) -> dict[str, Any]:
    """The completions at the cursor in the line of a session's magic; `names` gives those that its ranks have."""
    text, found = context.text_until_cursor, list[str]()
    if context.cursor_line == 0 and (match := re.match(rf"%%{magic}\s+(.*)", text)):
        found = completions(match[1], cell_flags())
    elif match := re.match(rf"(?:[^%]*=)?\s*%{magic}\s+(.*)", text):
        word, space, rest = match[1].partition(" ")
        commands = {line_command.word: line_command for line_command in line_commands()}
        if not space:
            found = [command for command in commands if command.startswith(word)]
        # a call is Python, which IPython completes
        elif word in commands and word != "run":
            own = (name for name in shell.user_ns if not name.startswith("_") and name not in shell.user_ns_hidden)
            others = sorted(own) if word == "push" else names() if word == "pull" else ()
            found = completions(rest.lstrip(), commands[word].flags, others)
    return _reply((text for text in found if text.startswith(context.token)), "magic")


def register(shell: Any, name: str, names: Callable[[], Iterable[str]]) -> None:
    """Complete the lines of the magics of this name from now on; `names` gives the names that the session's ranks have."""
    _add_matcher(shell, partial(_in_magic, shell=shell, magic=name, names=names), _IDENTIFIER)


# ------------------------------------------------------------------------------------------------- calls of launchers


# An argument at the end of a text, of which the value has begun.
_ARGUMENT = re.compile(r"\b(?P<name>\w+)\s*=\s*(?P<quote>[\"']?)(?P<start>[\w-]*)$")
# Comments and texts, in which brackets mean nothing, and brackets with what is called by them.
_BRACKETS = re.compile(
    r"#[^\n]*|\"\"\".*?\"\"\"|'''.*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
    r"|(?P<open>(?P<called>[\w.]*)\s*[(\[{])|(?P<close>[)\]}])",
    re.DOTALL,
)


def _in_call(context: Any, shell: Any) -> dict[str, Any]:
    """The values of a setting at the cursor, in the call of a launcher: `notebook_launcher(train, engine="` has some."""
    above = context.full_text.split("\n")[: context.cursor_line]
    text = "\n".join([*above, context.text_until_cursor])
    fitting: list[str] = []
    if (argument := _ARGUMENT.search(text)) is not None:
        start = argument["start"]
        # a page that closes quotes by itself has done so already
        quote = "" if argument["quote"] else '"'
        values = _values_of(argument["name"], quote, text[: argument.start()], shell.user_ns)
        # IPython replaces the token, which may hold the name and the quote, too
        kept = context.token[: max(len(context.token) - len(start), 0)]
        fitting = [f"{kept}{value}" for value in values if value.startswith(start)]
    return _reply(fitting, "param")


def _values_of(name: str, quote: str, text: str, names: Mapping[str, Any]) -> list[str]:
    """The values of a setting as Python, where the innermost call that is open at the end of a text is a launcher's."""
    calls: list[str] = []
    for found in _BRACKETS.finditer(text):
        if found["open"]:
            calls.append(found["called"])
        elif found["close"] and calls:
            calls.pop()
    if not calls or not _is_launcher(calls[-1], names):
        return []
    setting = next((setting for setting in all_settings() if setting.name == name), None)
    if setting is None:
        return []
    return (
        ["True", "False"]
        if isinstance(setting.value_type, Boolean)
        else [f"{quote}{choice}{quote}" for choice in setting.choices]
    )


def _is_launcher(called: str, names: Mapping[str, Any]) -> bool:
    first, *rest = called.split(".")
    found = names.get(first)
    for name in rest:
        # of modules alone: an attribute of anything else may do something when it is read
        found = getattr(found, name, None) if isinstance(found, ModuleType) else None
    return getattr(found, "__module__", "") == "accelerate_nb.notebook.api" and hasattr(found, "__signature__")


def register_values(shell: Any) -> None:
    """Complete the values of settings in calls of launchers from now on."""
    with suppress(AttributeError):
        _add_matcher(shell, partial(_in_call, shell=shell), "accelerate_nb.values")


def _add_matcher(shell: Any, matcher: Callable[[Any], dict[str, Any]], identifier: str) -> None:
    """Have a shell complete by this matcher first, in the place of a former one of this name, where IPython has matchers."""
    try:
        from IPython.core.completer import context_matcher
    except ImportError:  # before IPython 8.6
        return
    unregister(shell, identifier)

    # IPython sets attributes of a matcher, and reads what only a function has
    @context_matcher(priority=_FIRST, identifier=identifier)  # type: ignore[untyped-decorator]  # IPython leaves it without types
    def match(context: Any) -> dict[str, Any]:
        return matcher(context)

    shell.Completer.custom_matchers.append(match)


def unregister(shell: Any, identifier: str = _IDENTIFIER) -> None:
    """Take the matcher of this name from a shell, by default that of the magics."""
    matchers = shell.Completer.custom_matchers
    matchers[:] = [matcher for matcher in matchers if getattr(matcher, "matcher_identifier", None) != identifier]
