"""Commands that install packages: a script leaves them out, unless `keep_installs` is set."""

from __future__ import annotations

import re

# What pip, conda and their like are called with to change what is installed.
_VERBS = r"(?:install|uninstall|update|upgrade|remove|add|dist-upgrade|full-upgrade|create)\b"
_TOOLS = (
    r"(?:pip[\d.]*|conda|mamba|micromamba|apt|apt-get|aptitude|brew|yum|dnf|apk|poetry|npm|yarn|uv(?:\s+pip)?|R\s+CMD)"
)
_PYTHON = r"(?:\S*python[\d.]*|\{sys\.executable\}|\"\{sys\.executable\}\"|\$\{?sys\.executable\}?)\s+-m\s+"
_INSTALLS = re.compile(rf"\s*(?:sudo\s+|yes\s*\|\s*|\w+=\S+\s+)*(?:{_PYTHON})?{_TOOLS}\s+(?:-\S+\s+)*{_VERBS}")
_BETWEEN = re.compile(r"&&|\|\||;|\n")
_PIP = re.compile(rf"\s*(?:{_PYTHON})?pip[\d.]*\s+(?P<arguments>.*)", re.DOTALL)

WHY = "a script doesn't install packages; `--keep-installs` keeps it."


def only_installs(command: str) -> bool:
    """
    Whether every part of a command of a shell installs packages.

    >>> only_installs("pip install -q torch && apt-get update"), only_installs("pip install x && python x.py")
    (True, False)
    """
    parts = [part for part in _BETWEEN.split(command) if part.strip() and not part.lstrip().startswith("#")]
    return bool(parts) and all(_INSTALLS.match(part) for part in parts)


def arguments_of_pip(command: str) -> str | None:
    """
    The arguments of a command that only calls pip; None for other commands.

    >>> arguments_of_pip("pip install x"), arguments_of_pip("pip list | grep x")
    ('install x', None)
    """
    found = _PIP.fullmatch(command)
    return found["arguments"] if found and not re.search(r"[|;&<>\n`]|\$\(", found["arguments"]) else None
