"""Commands to a shell as Python: `!command`, `x = !command` and the magics that are short for one."""

from __future__ import annotations

import re
from dataclasses import replace

from accelerate_nb.export.ipython.pip import WHY, arguments_of_pip, only_installs
from accelerate_nb.export.ipython.replacements import (
    SHELL,
    MagicCall,
    Replacement,
    expression,
    is_fixed,
    left_out,
    through_ipython,
)

_ONLY_CD = re.compile(r"\s*cd\b[^&|;\n]*")
# IPython's own short names for commands, on Linux.
ALIASES = {
    **{name: name for name in ("cat", "cp", "mkdir", "mv", "rm", "rmdir")},
    "ll": "ls -F -o --color",
    "ls": "ls -F --color",
}


def run(call: MagicCall) -> Replacement:
    """`!command`."""
    command = call.text
    if only_installs(command) and not call.export_options.keep_installs:
        return left_out(f"!{command.strip()}", WHY)
    if _ONLY_CD.fullmatch(command):
        return left_out(f"!{command.strip()}", "it changes the folder of its own shell only; %cd changes the script's.")
    if (arguments := arguments_of_pip(command)) is not None:
        return pip(call, arguments)
    text, imports = expression(command, call)
    return Replacement(f"nb_shell.run({text}{call.every})", (SHELL, *imports))


def captured(call: MagicCall) -> Replacement:
    """`x = !command`, `%sx` and `!!`: the lines that it prints."""
    if only_installs(call.text) and not call.export_options.keep_installs:
        return left_out(f"!{call.text.strip()}", WHY)
    text, imports = expression(call.text, call)
    return Replacement(f"nb_shell.capture({text})", (SHELL, *imports))


def pip(call: MagicCall, arguments: str) -> Replacement:
    """`%pip`, and `!pip`, for the Python that runs the script."""
    text, imports = expression(arguments, call)
    return Replacement(f"nb_shell.pip({text}{call.every})", (SHELL, *imports))


def packages(call: MagicCall) -> Replacement:
    """`%pip`, `%conda`, `%uv` and their like."""
    command = f"{call.name} {call.text}"
    if only_installs(command) and not call.export_options.keep_installs:
        return left_out(f"%{command.strip()}", WHY)
    if call.name == "pip":
        return pip(call, call.text)
    return run(replace(call, text=command))


def alias(call: MagicCall) -> Replacement:
    """`%ls`, `%mkdir` and IPython's other short names for commands."""
    return run(replace(call, text=f"{ALIASES[call.name]} {call.text.strip()}".rstrip()))


def folder(call: MagicCall) -> Replacement:
    """`%cd folder`."""
    words = call.text.strip()
    quiet = re.match(r"-q(?:\s+|$)", words)
    words = words[quiet.end() :] if quiet else words
    if re.match(r"-b\b", words):
        return through_ipython(call)
    if re.match(r"-\d|--", words):
        problem = f"%cd {words} needs IPython's history of folders, which a script does not have. Name the folder."
        return Replacement(problem=problem)
    last = ", quiet=True" if quiet else ""
    if not words:
        return Replacement(f"nb_shell.cd({last[2:]})", (SHELL,))
    text, imports = expression(_unquoted(words), call)
    return Replacement(f"nb_shell.cd({text}{last})", (SHELL, *imports))


def variable(call: MagicCall) -> Replacement:
    """`%env NAME`, `%env NAME=value` and `%set_env`."""
    assignment = call.text.strip()
    if not assignment:
        if call.is_assigned:
            return Replacement("dict(os.environ)", ("import os",))
        return left_out("%env", "it only lists the environment.")
    name, given, value = assignment.partition("=" if "=" in assignment else " ")
    name, value = name.strip(), value.strip()
    if not is_fixed(name) or re.search(r"\s", name):
        return through_ipython(call)
    if not given:
        return Replacement(f"os.environ[{expression(name, call)[0]}]", ("import os",))
    text, imports = expression(value, call)
    return Replacement(f"nb_shell.set_env({expression(name, call)[0]}, {text})", (SHELL, *imports))


def _unquoted(words: str) -> str:
    found = re.fullmatch(r"""(['"])(.*)\1""", words)
    return found[2] if found else re.sub(r"\\(.)", r"\1", words)
