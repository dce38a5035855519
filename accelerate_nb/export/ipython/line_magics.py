"""Line magics as Python: `%time f()`, `%run file.py`, `%matplotlib` and the others that mean something in a script."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from accelerate_nb.export.ipython import shell_commands
from accelerate_nb.export.ipython.find import parsed
from accelerate_nb.export.ipython.replacements import (
    FILES,
    TIMING,
    MagicCall,
    Replacement,
    expression,
    left_out,
    options,
    quoted,
    refused,
)

# What `%matplotlib name` makes of a name; other names are shown by notebooks only.
_BACKENDS = {
    "agg": "agg",
    "cairo": "cairo",
    "gtk": "gtk3agg",
    "gtk3": "gtk3agg",
    "gtk4": "gtk4agg",
    "macosx": "macosx",
    "osx": "macosx",
    "pdf": "pdf",
    "ps": "ps",
    "qt": "qtagg",
    "qt5": "qt5agg",
    "qt6": "qtagg",
    "svg": "svg",
    "tk": "tkagg",
    "webagg": "webagg",
    "wx": "wxagg",
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
# Options of magics that measure what code does, in the manner of `getopt`; the rest is the code.
MEASURING = {"lprun": "rsf:m:D:T:z:u:", "memit": "r:t:i:oc", "mprun": "rf:T:c", "prun": "D:l:rs:T:q"}
_WORD = re.compile(r"""(?:\{[^{}]*\}|'[^']*'|"[^"]*"|\\.|[^\s'"{}\\]|[{}])+""")


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
    return refused(f"%{call.name}", "means nothing outside of a notebook")


def known() -> frozenset[str]:
    """The magics that may stand without their `%` in a cell of one line."""
    return frozenset({*_LEFT_OUT, *_HANDLERS})


def timeit_options(flags: dict[str, str]) -> list[str]:
    """The options of `%timeit` as arguments."""
    found = [f"{name}={int(flags[char])}" for char, name in _COUNTS if flags.get(char, "").isdigit()]
    return found + [f"{name}=True" for char, name in (("c", "cpu"), ("q", "quiet")) if char in flags]


def _extension(call: MagicCall) -> Replacement:
    if call.text.strip() in {"accelerate_nb", "autoreload"}:
        return Replacement()
    return left_out(f"%{call.name} {call.text.strip()}", "an extension changes the notebook only.")


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
    if tree is None or not tree.body:
        return refused("%time", "has no statement to measure")
    imports = (TIMING, *inner.imports)
    only = tree.body[0]
    if len(tree.body) == 1 and isinstance(only, ast.Expr) and _fits_a_lambda(only) and not _only_inside(call):
        value = ast.get_source_segment(inner.source, only.value) or ""
        silent = ";" if code.rstrip().endswith(";") and not call.is_assigned else ""
        value = f"({value})" if isinstance(only.value, (ast.Tuple, ast.Starred)) else value
        return Replacement(f"nb_timing.timed(lambda: {value}){silent}", imports)
    if call.is_assigned:
        return refused("%time", "gives no value here")
    if any(hasattr(node, "body") for node in tree.body):
        return Replacement(f"with nb_timing.Clock(): exec({quoted(inner.source)})", imports)
    return Replacement(f"with nb_timing.Clock(): {inner.source.strip()}", imports)


def _only_inside(call: MagicCall) -> bool:
    """Whether the value can't be used, as in a block."""
    return call.is_inside and not call.is_assigned


def _fits_a_lambda(node: ast.Expr) -> bool:
    node_types = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
    return not any(isinstance(item, node_types) for item in ast.walk(node))


_COUNTS = (("n", "loops"), ("r", "repeat"), ("p", "digits"))


def _timeit(call: MagicCall) -> Replacement:
    flags, code = options(call.text, "n:r:tcp:qov:")
    if not code.strip():
        return Replacement()
    inner = call.plain(code)
    if inner.problems:
        return Replacement(problem=inner.problems[0].text)
    function = "measured" if flags.keys() & {"o", "v"} else "timeit"
    arguments = ", ".join([quoted(inner.source.strip()), call.names, *timeit_options(flags)])
    return Replacement(f"nb_timing.{function}({arguments})", (TIMING, *inner.imports), target=flags.get("v"))


def _measuring(call: MagicCall) -> Replacement:
    _, code = options(call.text, MEASURING[call.name])
    inner = call.plain(code)
    if call.is_assigned:
        return refused(f"%{call.name}", "gives no value in a script")
    if inner.problems or not code.strip():
        return (
            Replacement(problem=inner.problems[0].text)
            if inner.problems
            else refused(f"%{call.name}", "measures nothing")
        )
    return Replacement(
        inner.source, inner.imports, note=f"%{call.name} measures nothing in a script: its code runs as it is."
    )


def _run(call: MagicCall) -> Replacement:
    flags, rest = options(call.text, "nidtN:b:pl:rs:T:em:G")
    if flags.keys() & {"d", "b"}:
        return refused("%run -d", "starts a debugger")
    words = _WORD.findall(rest)
    name = flags.get("m") or (words.pop(0) if words else "")
    if not name:
        return refused("%run", "names no file")
    path, imports = expression(name.strip("'\""), call)
    arguments = [_word(word, call, is_plain="G" in flags) for word in words]
    keywords = [text for char, text in _RUN if char in flags]
    every = [path, f"[{', '.join(text for text, _ in arguments)}]", "globals()", *keywords]
    found = (FILES, *imports, *(item for _, more in arguments for item in more))
    note = "%run measures nothing in a script: the file runs as it is." if flags.keys() & {"t", "p"} else None
    return Replacement(f"nb_files.run_file({', '.join(every)})", tuple(dict.fromkeys(found)), note)


_RUN = (("i", "shares=True"), ("n", "as_main=False"), ("e", "exits=False"), ("m", "is_module=True"))


def _word(word: str, call: MagicCall, *, is_plain: bool) -> tuple[str, tuple[str, ...]]:
    """An argument of a command line; a pattern of file names becomes a list of files."""
    bare = re.sub(r"""(['"])(.*?)\1|\\(.)""", lambda found: found[2] or found[3] or "", word)
    text, imports = expression(bare, call)
    if bare == word and not is_plain and re.search(r"[*?~]|\[.*\]", word) and "{" not in word:
        return f"*nb_files.matching({text})", imports
    return text, imports


def _folder(call: MagicCall) -> Replacement:
    return Replacement("os.getcwd()", ("import os",)) if not call.text.strip() else refused("%pwd", "takes nothing")


def _deleted(call: MagicCall) -> Replacement:
    return (
        Replacement(f"del {call.text.strip()}")
        if call.text.strip().isidentifier()
        else refused("%xdel", "names nothing")
    )


_HANDLERS: dict[str, Callable[[MagicCall], Replacement]] = {
    **dict.fromkeys(shell_commands.ALIASES, shell_commands.alias),
    **dict.fromkeys(("conda", "mamba", "micromamba", "pip", "uv"), shell_commands.packages),
    **dict.fromkeys(("sx", "system"), shell_commands.captured),
    **dict.fromkeys(MEASURING, _measuring),
    **dict.fromkeys(("env", "set_env"), shell_commands.variable),
    **dict.fromkeys(("load_ext", "reload_ext"), _extension),
    "cd": shell_commands.folder,
    "matplotlib": _matplotlib,
    "pwd": _folder,
    "run": _run,
    "time": _time,
    "timeit": _timeit,
    "xdel": _deleted,
}
