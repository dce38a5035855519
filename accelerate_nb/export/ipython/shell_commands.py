"""Commands to a shell as Python: `!command`, `x = !command` and the magics that are short for one."""

from __future__ import annotations

import re

from accelerate_nb.export.installing import WHY, arguments_of_pip, only_installs
from accelerate_nb.export.saying import SHELL, Asked, Said, expression, is_fixed, left_out

_ONLY_CD = re.compile(r"\s*cd\b[^&|;\n]*")
# IPython's own short names for commands, on Linux.
ALIASES = {
    "cat": "cat",
    "cp": "cp",
    "ldir": "ls -F -o --color {} | grep /$",
    "lf": "ls -F -o --color {} | grep ^-",
    "lk": "ls -F -o --color {} | grep ^l",
    "ll": "ls -F -o --color",
    "ls": "ls -F --color",
    "lx": "ls -F -o --color {} | grep ^-..x",
    "mkdir": "mkdir",
    "mv": "mv",
    "rm": "rm",
    "rmdir": "rmdir",
}


def run(asked: Asked) -> Said:
    """`!command`."""
    command = asked.text
    if only_installs(command) and not asked.wishes.keep_installs:
        return left_out(f"!{command.strip()}", WHY)
    if _ONLY_CD.fullmatch(command):
        return left_out(f"!{command.strip()}", "it changes the folder of its own shell only; %cd changes the script's.")
    if (arguments := arguments_of_pip(command)) is not None:
        return pip(asked, arguments)
    text, imports = expression(command, asked)
    return Said(f"nb_shell.run({text}{asked.every})", (SHELL, *imports))


def captured(asked: Asked) -> Said:
    """`x = !command`, `%sx` and `!!`: the lines that it prints."""
    if only_installs(asked.text) and not asked.wishes.keep_installs:
        return left_out(f"!{asked.text.strip()}", WHY)
    text, imports = expression(asked.text, asked)
    return Said(f"nb_shell.capture({text})", (SHELL, *imports))


def pip(asked: Asked, arguments: str) -> Said:
    """`%pip`, and `!pip`, for the Python that runs the script."""
    text, imports = expression(arguments, asked)
    return Said(f"nb_shell.pip({text}{asked.every})", (SHELL, *imports))


def packages(asked: Asked) -> Said:
    """`%pip`, `%conda`, `%uv` and their like."""
    command = f"{asked.name} {asked.text}"
    if only_installs(command) and not asked.wishes.keep_installs:
        return left_out(f"%{command.strip()}", WHY)
    if asked.name == "pip":
        return pip(asked, asked.text)
    return run(_with(asked, command))


def alias(asked: Asked) -> Said:
    """`%ls`, `%mkdir` and IPython's other short names for commands."""
    command = ALIASES[asked.name]
    rest = asked.text.strip()
    full = command.replace("{}", rest) if "{}" in command else f"{command} {rest}".rstrip()
    return run(_with(asked, full))


def folder(asked: Asked) -> Said:
    """`%cd folder`."""
    words = asked.text.strip()
    quiet = re.match(r"-q(?:\s+|$)", words)
    words = words[quiet.end() :] if quiet else words
    if re.match(r"-\d|--|-b\b", words):
        return Said(
            problem=f"%cd {words} asks for a folder that IPython remembers; a script has none. Name the folder."
        )
    last = ", quiet=True" if quiet else ""
    if not words:
        return Said(f"nb_shell.cd({last[2:]})", (SHELL,))
    text, imports = expression(_unquoted(words), asked)
    return Said(f"nb_shell.cd({text}{last})", (SHELL, *imports))


def variable(asked: Asked) -> Said:
    """`%env NAME`, `%env NAME=value` and `%set_env`."""
    said = asked.text.strip()
    if not said:
        if asked.is_assigned:
            return Said("dict(os.environ)", ("import os",))
        return left_out("%env", "it only lists the environment.")
    name, given, value = said.partition("=" if "=" in said else " ")
    name, value = name.strip(), value.strip()
    if not is_fixed(name) or re.search(r"\s", name):
        return Said(problem=f"%env {said} names no one variable. Write it as `os.environ[...] = ...`.")
    if not given:
        return Said(f"os.environ[{expression(name, asked)[0]}]", ("import os",))
    text, imports = expression(value, asked)
    return Said(f"nb_shell.set_env({expression(name, asked)[0]}, {text})", (SHELL, *imports))


def _unquoted(words: str) -> str:
    found = re.fullmatch(r"""(['"])(.*)\1""", words)
    return found[2] if found else re.sub(r"\\(.)", r"\1", words)


def _with(asked: Asked, command: str) -> Asked:
    return Asked(
        asked.name, command, asked.wishes, asked.plain, asked.is_assigned, asked.is_inside, on_ranks=asked.on_ranks
    )
