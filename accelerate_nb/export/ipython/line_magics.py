"""Line magics as Python: `%time f()`, `%run file.py`, `%matplotlib` and the others that mean something in a script."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from accelerate_nb.export import commands
from accelerate_nb.export.calls import parsed
from accelerate_nb.export.saying import (
    FILES,
    TIMING,
    Asked,
    Said,
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
_SHOWS = "it only shows something to whoever sits at a notebook."
_NOTEBOOKS_OWN = "it is a setting of the notebook."
_LEFT_OUT = {
    **dict.fromkeys(("aimport", "autoreload"), "a script reads each module once, when it starts."),
    **dict.fromkeys(
        ("autoawait", "autocall", "automagic", "colors", "config", "doctest_mode", "gui", "pdb", "precision", "pprint",
         "profile", "xmode", "unload_ext", "logstart", "logstop", "logon", "logoff", "logstate", "killbgscripts"),
        _NOTEBOOKS_OWN,
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


def line(asked: Asked) -> Said:
    """What a line magic is in Python."""
    if asked.name in _LEFT_OUT:
        name = f"{asked.text}?" if asked.name in {"pinfo", "pinfo2", "psearch"} else f"%{asked.name}"
        return left_out(name, _LEFT_OUT[asked.name])
    handler = _HANDLERS.get(asked.name)
    if handler is not None:
        return handler(asked)
    if asked.name.startswith("%"):
        return Said(
            problem=f"%{asked.name} stands below other lines, but IPython takes it in the first line of a cell only. "
            "Move it to the top, or give it a cell of its own."
        )
    return refused(f"%{asked.name}", "means nothing outside of a notebook")


def known() -> frozenset[str]:
    """The magics that may stand without their `%` in a cell of one line."""
    return frozenset({*_LEFT_OUT, *_HANDLERS})


def timeit_options(said: dict[str, str]) -> list[str]:
    """The options of `%timeit` as arguments."""
    found = [f"{name}={int(said[letter])}" for letter, name in _COUNTS if said.get(letter, "").isdigit()]
    return found + [f"{name}=True" for letter, name in (("c", "cpu"), ("q", "quiet")) if letter in said]


def _extension(asked: Asked) -> Said:
    if asked.text.strip() in {"accelerate_nb", "autoreload"}:
        return Said()
    return left_out(f"%{asked.name} {asked.text.strip()}", "an extension changes the notebook only.")


def _matplotlib(asked: Asked) -> Said:
    backend = _BACKENDS.get(asked.text.strip().lower())
    if backend is None:
        return Said()
    return Said(f"import matplotlib; matplotlib.use({quoted(backend)})")


def _time(asked: Asked) -> Said:
    code = re.sub(r"^\s*--no-raise-error\s+", "", asked.text)
    inner = asked.plain(code)
    if inner.problems:
        return Said(problem=inner.problems[0].text)
    tree = parsed(inner.source)
    if tree is None or not tree.body:
        return refused("%time", "has no statement to measure")
    imports = (TIMING, *inner.imports)
    only = tree.body[0]
    if len(tree.body) == 1 and isinstance(only, ast.Expr) and _fits_a_lambda(only) and not _only_inside(asked):
        value = ast.get_source_segment(inner.source, only.value) or ""
        silent = ";" if code.rstrip().endswith(";") and not asked.is_assigned else ""
        value = f"({value})" if isinstance(only.value, (ast.Tuple, ast.Starred)) else value
        return Said(f"nb_timing.timed(lambda: {value}){silent}", imports)
    if asked.is_assigned:
        return refused("%time", "gives no value here")
    if any(hasattr(node, "body") for node in tree.body):
        return Said(f"with nb_timing.Clock(): exec({quoted(inner.source)})", imports)
    return Said(f"with nb_timing.Clock(): {inner.source.strip()}", imports)


def _only_inside(asked: Asked) -> bool:
    """Whether no value can be wanted, as in a block."""
    return asked.is_inside and not asked.is_assigned


def _fits_a_lambda(node: ast.Expr) -> bool:
    kinds = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
    return not any(isinstance(one, kinds) for one in ast.walk(node))


_COUNTS = (("n", "loops"), ("r", "repeat"), ("p", "digits"))


def _timeit(asked: Asked) -> Said:
    said, code = options(asked.text, "n:r:tcp:qov:")
    if not code.strip():
        return Said()
    inner = asked.plain(code)
    if inner.problems:
        return Said(problem=inner.problems[0].text)
    function = "measured" if said.keys() & {"o", "v"} else "timeit"
    arguments = ", ".join([quoted(inner.source.strip()), asked.names, *timeit_options(said)])
    return Said(f"nb_timing.{function}({arguments})", (TIMING, *inner.imports), target=said.get("v"))


def _measuring(asked: Asked) -> Said:
    _, code = options(asked.text, MEASURING[asked.name])
    inner = asked.plain(code)
    if asked.is_assigned:
        return refused(f"%{asked.name}", "gives no value in a script")
    if inner.problems or not code.strip():
        return Said(problem=inner.problems[0].text) if inner.problems else refused(f"%{asked.name}", "measures nothing")
    return Said(
        inner.source, inner.imports, note=f"%{asked.name} measures nothing in a script: its code runs as it is."
    )


def _run(asked: Asked) -> Said:
    said, rest = options(asked.text, "nidtN:b:pl:rs:T:em:G")
    if said.keys() & {"d", "b"}:
        return refused("%run -d", "starts a debugger")
    words = _WORD.findall(rest)
    name = said.get("m") or (words.pop(0) if words else "")
    if not name:
        return refused("%run", "names no file")
    path, imports = expression(name.strip("'\""), asked)
    arguments = [_word(word, asked, is_plain="G" in said) for word in words]
    flags = [text for letter, text in _RUN if letter in said]
    every = [path, f"[{', '.join(text for text, _ in arguments)}]", "globals()", *flags]
    found = (FILES, *imports, *(one for _, more in arguments for one in more))
    note = "%run measures nothing in a script: the file runs as it is." if said.keys() & {"t", "p"} else None
    return Said(f"nb_files.run_file({', '.join(every)})", tuple(dict.fromkeys(found)), note)


_RUN = (("i", "shares=True"), ("n", "as_main=False"), ("e", "exits=False"), ("m", "is_module=True"))


def _word(word: str, asked: Asked, *, is_plain: bool) -> tuple[str, tuple[str, ...]]:
    """A word of a command line; what stands for several files is a list of them."""
    bare = re.sub(r"""(['"])(.*?)\1|\\(.)""", lambda found: found[2] or found[3] or "", word)
    text, imports = expression(bare, asked)
    if bare == word and not is_plain and re.search(r"[*?~]|\[.*\]", word) and "{" not in word:
        return f"*nb_files.matching({text})", imports
    return text, imports


def _here(asked: Asked) -> Said:
    return Said("os.getcwd()", ("import os",)) if not asked.text.strip() else refused("%pwd", "takes nothing")


def _deleted(asked: Asked) -> Said:
    return Said(f"del {asked.text.strip()}") if asked.text.strip().isidentifier() else refused("%xdel", "names nothing")


_HANDLERS: dict[str, Callable[[Asked], Said]] = {
    **dict.fromkeys(commands.ALIASES, commands.alias),
    **dict.fromkeys(("conda", "mamba", "micromamba", "pip", "uv"), commands.packages),
    **dict.fromkeys(("sx", "system"), commands.captured),
    **dict.fromkeys(MEASURING, _measuring),
    **dict.fromkeys(("env", "set_env"), commands.variable),
    **dict.fromkeys(("load_ext", "reload_ext"), _extension),
    "cd": commands.folder,
    "matplotlib": _matplotlib,
    "pwd": _here,
    "run": _run,
    "time": _time,
    "timeit": _timeit,
    "xdel": _deleted,
}
