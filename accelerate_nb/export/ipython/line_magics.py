"""Line magics: `%time f()`, `%matplotlib` and other common ones as Python; IPython runs the rest."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from accelerate_nb.export.ipython import shell_commands
from accelerate_nb.export.ipython.find import parsed
from accelerate_nb.export.ipython.replacements import (
    TIMING,
    MagicCall,
    Replacement,
    left_out,
    quoted,
    refused,
    through_ipython,
)

# What `%matplotlib name` makes of a name; other names are shown by notebooks only.
_BACKENDS = {
    **{name: name for name in ("agg", "cairo", "macosx", "pdf", "ps", "svg", "webagg")},
    **{name: f"{name}agg" for name in ("gtk3", "gtk4", "qt", "qt5", "tk", "wx")},
    "gtk": "gtk3agg",
    "osx": "macosx",
    "qt6": "qtagg",
}
_SHOWS = "it only shows something in a notebook."
_OF_THE_NOTEBOOK = "it is a setting of the notebook."
_LEFT_OUT = {
    **dict.fromkeys(("aimport", "autoreload"), "a script reads each module once, when it starts."),
    **dict.fromkeys(
        ("autoawait", "autocall", "automagic", "colors", "config", "doctest_mode", "gui", "pdb", "precision", "pprint",
         "profile", "xmode", "unload_ext", "logstart", "logstop", "logon", "logoff", "logstate", "killbgscripts"),
        _OF_THE_NOTEBOOK,
    ),
    **dict.fromkeys(
        ("bookmark", "dhist", "dirs", "hist", "history", "less", "lsmagic", "magic", "man", "more", "page", "pdef", "pdoc",
         "pfile", "pinfo", "pinfo2", "psearch", "psource", "pycat", "quickref", "who", "whos", "connect_info", "qtconsole",
         "clear", "cls", "tb", "tensorboard"),
        _SHOWS,
    ),
    **dict.fromkeys(("reset", "reset_selective"), "a script starts without names, and keeps those that it makes."),
}  # fmt: skip
# A person at a front end uses them.
INTERACTIVE = frozenset(
    ("cpaste", "debug", "ed", "edit", "load", "loadpy", "macro", "notebook", "paste", "pastebin", "recall", "rep", "rerun",
     "save")
)  # fmt: skip
# IPython runs them; like the others, they may stand without their `%`.
_RUN_BY_IPYTHON = frozenset(
    ("alias", "lprun", "memit", "mprun", "popd", "prun", "pushd", "pwd", "store", "timeit", "unalias", "xdel")
)  # fmt: skip
# Extensions for the page of a notebook; `autoreload` reads changed modules again while a person edits them.
_EXTENSIONS_OF_THE_PAGE = frozenset(
    {"accelerate_nb", "autoreload", "google.colab.data_table", "jupyter_black", "lab_black", "nb_black", "tensorboard"}
)
_DEBUGS = re.compile(r"\s*(-\w+\s+)*-\w*[db]")


def line(call: MagicCall) -> Replacement:
    """The translation of a line magic."""
    if call.name in _LEFT_OUT:
        name = f"{call.text}?" if call.name in {"pinfo", "pinfo2", "psearch"} else f"%{call.name}"
        return left_out(name, _LEFT_OUT[call.name])
    handler = _HANDLERS.get(call.name)
    if handler is not None:
        return handler(call)
    if call.name.startswith("%"):
        return Replacement(
            problem=f"%{call.name} is below other lines, but IPython takes it in the first line of a cell only. "
            "Move it to the top, or give it a cell of its own."
        )
    if call.name in INTERACTIVE:
        return refused(f"%{call.name}", "means nothing outside of a notebook")
    return through_ipython(call)


def known() -> frozenset[str]:
    """The magics that may stand without their `%` in a cell of one line."""
    return frozenset({*_LEFT_OUT, *_HANDLERS, *INTERACTIVE, *_RUN_BY_IPYTHON})


def _extension(call: MagicCall) -> Replacement:
    return Replacement() if call.text.strip() in _EXTENSIONS_OF_THE_PAGE else through_ipython(call)


def _matplotlib(call: MagicCall) -> Replacement:
    backend = _BACKENDS.get(call.text.strip().lower())
    if backend is None:
        return Replacement()
    return Replacement(f"import matplotlib; matplotlib.use({quoted(backend)})")


def _time(call: MagicCall) -> Replacement:
    code = re.sub(r"^\s*--no-raise-error\s+", "", call.text)
    inner = call.plain(code)
    if inner.problems:
        return Replacement(problem=inner.problems[0].text)
    tree = parsed(inner.source)
    if tree is None or not tree.body or any(hasattr(node, "body") for node in tree.body):
        return through_ipython(call)
    imports = (TIMING, *inner.imports)
    only = tree.body[0]
    is_unused = call.is_inside and not call.is_assigned
    if len(tree.body) == 1 and isinstance(only, ast.Expr) and _fits_a_lambda(only) and not is_unused:
        value = ast.get_source_segment(inner.source, only.value) or ""
        silent = ";" if code.rstrip().endswith(";") and not call.is_assigned else ""
        value = f"({value})" if isinstance(only.value, (ast.Tuple, ast.Starred)) else value
        return Replacement(f"nb_timing.timed(lambda: {value}){silent}", imports)
    if call.is_assigned:
        return through_ipython(call)
    return Replacement(f"with nb_timing.Clock(): {inner.source.strip()}", imports)


def _fits_a_lambda(node: ast.Expr) -> bool:
    node_types = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
    return not any(isinstance(item, node_types) for item in ast.walk(node))


def _run(call: MagicCall) -> Replacement:
    return refused("%run -d", "starts a debugger") if _DEBUGS.match(call.text) else through_ipython(call)


_HANDLERS: dict[str, Callable[[MagicCall], Replacement]] = {
    **dict.fromkeys(shell_commands.ALIASES, shell_commands.alias),
    **dict.fromkeys(("conda", "mamba", "micromamba", "pip", "uv"), shell_commands.packages),
    **dict.fromkeys(("sx", "system"), shell_commands.captured),
    **dict.fromkeys(("env", "set_env"), shell_commands.variable),
    **dict.fromkeys(("load_ext", "reload_ext"), _extension),
    "cd": shell_commands.folder,
    "matplotlib": _matplotlib,
    "run": _run,
    "time": _time,
}
