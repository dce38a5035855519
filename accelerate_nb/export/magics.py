"""A code cell as plain Python: IPython's own syntax becomes calls of the script's shell, or is left out or refused, line by line."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from accelerate_nb.config.formats import literal
from accelerate_nb.config.magic_args import call_in, names_of, read, read_cell_line, read_line, refuse
from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.export.python_source import CODE_MAGICS, end_of


@dataclass(frozen=True, slots=True)
class Remark:
    """A remark on a line of a cell; lines count from 1."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class PlainCell:
    """A cell without IPython's own syntax."""

    # `source` has exactly as many lines as the cell, and calls `nb_shell`, `accelerate_nb.script.shell`. A problem
    # prevents the export, a note is a warning. `left_out`: the script has it as comments only. `on_ranks`: its
    # %%accelerate line and its %accelerate lines.

    source: str
    notes: tuple[Remark, ...] = ()
    problems: tuple[Remark, ...] = ()
    left_out: bool = False
    on_ranks: tuple[Remark, ...] = ()

    @property
    def tree(self) -> ast.Module:
        """Its statements; a cell that is left out has none."""
        return ast.parse("" if self.left_out else self.source)


# ------------------------------------------------------------------------------------- what is left out, and what is refused

_SHOWS = "it only shows something in a notebook."
_OF_THE_NOTEBOOK = "it is a setting of the notebook."
_NO_INSTALL = "a script doesn't install packages; `--keep-installs` keeps it."
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
_INTERACTIVE = frozenset(
    ("cpaste", "debug", "ed", "edit", "load", "loadpy", "macro", "notebook", "paste", "pastebin", "recall", "rep", "rerun",
     "save")
)  # fmt: skip
# The others that may stand without their `%` in a cell of one line.
_AUTOMAGIC = frozenset(
    ("alias", "cat", "cd", "conda", "cp", "env", "ll", "load_ext", "lprun", "ls", "mamba", "matplotlib", "memit",
     "micromamba", "mkdir", "mprun", "mv", "pip", "popd", "prun", "pushd", "pwd", "reload_ext", "rm", "rmdir", "run",
     "set_env", "store", "sx", "system", "time", "timeit", "unalias", "uv", "xdel")
)  # fmt: skip
MAGICS = frozenset({*_LEFT_OUT, *_INTERACTIVE, *_AUTOMAGIC})
# Extensions for the page of a notebook; `autoreload` reads changed modules again while a person edits them.
_EXTENSIONS_OF_THE_PAGE = frozenset(
    {"accelerate_nb", "autoreload", "google.colab.data_table", "jupyter_black", "lab_black", "nb_black", "tensorboard"}
)
# What `%matplotlib` may name that only a notebook shows.
_BACKENDS_OF_THE_PAGE = frozenset({"", "auto", "inline", "ipympl", "nbagg", "notebook", "widget"})
_SHOWN_CELLS = frozenset(("html", "HTML", "javascript", "js", "latex", "markdown", "svg", "SVG"))
ACCELERATE = "accelerate"
_HELP = frozenset({"-h", "--help", "help"})
# Commands of `%accelerate` that a script has no use for, and why.
_UNUSED = {
    "status": "",
    "stacks": "",
    "logs": "",
    "wait": "a script's cells wait for each other anyway",
    "interrupt": "a script's cells wait for each other anyway",
    "runs": "",
    "config": "pass the settings to %%accelerate, or to accelerate-nb launch",
}
_INSTALLERS = frozenset(("conda", "mamba", "micromamba", "pip", "uv"))
# What pip, conda and their like are called with to change what is installed.
_VERBS = r"(?:install|uninstall|update|upgrade|remove|add|dist-upgrade|full-upgrade|create)\b"
_TOOLS = (
    r"(?:pip[\d.]*|conda|mamba|micromamba|apt|apt-get|aptitude|brew|yum|dnf|apk|poetry|npm|yarn|uv(?:\s+pip)?|R\s+CMD)"
)
_PYTHON = r"(?:\S*python[\d.]*|\{sys\.executable\}|\"\{sys\.executable\}\"|\$\{?sys\.executable\}?)\s+-m\s+"
_INSTALLS = re.compile(rf"\s*(?:sudo\s+|yes\s*\|\s*|\w+=\S+\s+)*(?:{_PYTHON}|\S*/)?{_TOOLS}\s+(?:-\S+\s+)*{_VERBS}")
_QUOTED = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|(?<!\S)#.*")
_PIP = re.compile(rf"\s*(?:{_PYTHON})?pip[\d.]*\s+(?P<arguments>(?:(?!\$\()[^|;&<>\n`])*)")

# ------------------------------------------------------------------------------------------------------ reading as IPython

_Kind = Literal["line", "cell", "system", "getoutput", "usage"]
# The calls that IPython puts in place of its own syntax.
_METHODS: dict[str, _Kind] = {
    "run_line_magic": "line",
    "magic": "line",
    "system": "system",
    "getoutput": "getoutput",
    "show_usage": "usage",
}
# `%%time?` shows a help.
_CELL_MAGIC = re.compile(r"%%(?!\w+\?)(?P<name>\S+)(?: (?P<rest>.*))?")
# This is Python too, with another meaning.
_PROMPT = re.compile(r"^(?:\[(?:nav|ins)\])? ?In \[\d+\]: ", re.MULTILINE)
# Python follows as many levels of a statement at the least, on each version and from each place that it is called from.
_DEEPEST = 300
# A cell has as many calls at the most; whatever goes round in circles ends there.
_LIMIT = 10_000
_TOO_DEEP = Remark(
    1, "the cell is nested too deeply for Python to read it. Make several statements of its longest one."
)
# The length of a line in a problem.
_WIDEST = 100


@dataclass(frozen=True, slots=True)
class SyntaxPiece:
    """One piece of IPython's syntax: it begins after `before` in line `first` and ends with line `last`, counted from 1."""

    # `name` is that of a magic, and `text` what follows it on its line, or a command

    first: int
    last: int
    before: str
    kind: _Kind
    name: str
    text: str
    after: str = ""


def plain(source: str, *, keep_installs: bool = False, on_ranks: bool = False) -> PlainCell:
    """A cell as Python with exactly as many lines, with notes for the user."""
    # with `keep_installs` the script runs `%pip install` and its like too; `on_ranks` is the text of a %%accelerate cell
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    # before IPython parses it: on some Pythons each of its tokens holds a copy of the whole line
    if is_too_deep(source):
        return PlainCell(source, problems=(_TOO_DEEP,))
    originals = source.split("\n")
    translator = _CellTranslator(originals, keep_installs=keep_installs, on_ranks=on_ranks)
    tree = parsed(source)
    if tree is not None and not _PROMPT.search(source):
        return (
            translator.lines(originals, _calls_of_ipython(tree, originals))
            if "get_ipython" in source
            else PlainCell(source)
        )
    lines = _cleaned(originals)
    if (magic := cell_magic(lines)) is not None:
        return translator.cell(magic, lines)
    lines, calls = transformed(lines)
    filled = [line for line in lines if line.strip()]
    word = re.match(r"\s*(\w+)(?=\s|$)(?!\s*=)", filled[0]) if len(filled) == 1 else None
    if not calls and word is not None and word[1] in MAGICS:
        # a cell of one line is a magic without its `%`
        named = "\n".join(f"%{line.lstrip()}" if line.strip() else line for line in lines)
        return plain(named, keep_installs=keep_installs, on_ranks=on_ranks)
    return translator.lines(lines, calls)


def parsed(source: str) -> ast.Module | None:
    """The cell's statements; None if it is no Python."""
    with suppress(SyntaxError, ValueError, RecursionError):
        return ast.parse(source)
    return None


def is_too_deep(source: str) -> bool:
    """Whether a statement has more levels than Python can follow: what it can parse, it may not be able to compile."""
    try:
        level: list[ast.AST] = [ast.parse(source)]
    except RecursionError:
        return True
    except (SyntaxError, ValueError):
        return False
    depth = 0
    while level and depth <= _DEEPEST:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        depth += 1
    return bool(level)


def cell_magic(lines: Sequence[str]) -> SyntaxPiece | None:
    """The cell magic of a cell, in its first line that is not empty; the cell's text follows it."""
    number, first = next(((number, line) for number, line in enumerate(lines, start=1) if line.strip()), (1, ""))
    magic = _CELL_MAGIC.fullmatch(first.rstrip())
    return SyntaxPiece(number, number, "", "cell", magic["name"], magic["rest"] or "") if magic else None


def _cleaned(lines: Sequence[str]) -> list[str]:
    """The lines without a common indentation and without prompts."""
    from IPython.core.inputtransformer2 import TransformerManager

    begin = next((number for number, line in enumerate(lines) if line.strip()), 0)
    rest = [f"{line}\n" for line in lines[begin:]]
    manager: Any = TransformerManager()  # type: ignore[no-untyped-call] # IPython's own
    for clean in manager.cleanup_transforms:
        cleaner = clean(rest)
        # blank lines at the beginning are gone already; nothing else takes lines away
        rest = cleaner if len(cleaner) == len(rest) else rest
    return [*lines[:begin], *(line.removesuffix("\n") for line in rest)]


def transformed(lines: Sequence[str]) -> tuple[list[str], list[SyntaxPiece]]:
    """The lines with calls of IPython in place of its syntax, and these; all lines keep their numbers."""
    from IPython.core.inputtransformer2 import TransformerManager, make_tokens_by_line

    manager: Any = TransformerManager()  # type: ignore[no-untyped-call] # IPython's own
    now = [f"{line}\n" for line in lines]
    calls: list[SyntaxPiece] = []
    for _ in range(_LIMIT):
        tokens = make_tokens_by_line(now)
        found = filter(None, (transformer.find(tokens) for transformer in manager.token_transformers))
        for item in sorted(found, key=lambda item: item.sortby()):
            try:
                row, column, then = item.start_line, item.start_col, item.transform(now)
            except SyntaxError:
                continue
            missing = len(now) - len(then)
            now = [*then[: row + 1], *["#\n"] * missing, *then[row + 1 :]]
            if call := _call(then[row][column:].strip()):
                calls.append(replace(call, first=row + 1, last=row + 1 + missing, before=then[row][:column]))
            break
        else:
            break
    return [line.removesuffix("\n") for line in now], calls


def _calls_of_ipython(tree: ast.Module, lines: Sequence[str]) -> Iterator[SyntaxPiece]:
    """Calls of IPython's shell in the user's code: `get_ipython().system("ls")` as a statement, or assigned."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Expr, ast.Assign)) or node.value.lineno != node.lineno:
            continue
        value, (last, end) = node.value, end_of(node.value)
        call = _call(ast.get_source_segment("\n".join(lines), value) or "")
        if call is not None:
            before = lines[value.lineno - 1].encode()[: value.col_offset].decode()
            after = lines[last - 1].encode()[end:].decode()
            yield replace(call, first=value.lineno, last=last, before=before, after=after)


def _call(text: str) -> SyntaxPiece | None:
    """The syntax piece for a call of a method of IPython's shell with texts for arguments."""
    tree = parsed(text)
    node = tree.body[0] if tree and len(tree.body) == 1 else None
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return None
    function, arguments = node.value.func, node.value.args
    if not isinstance(function, ast.Attribute) or ast.unparse(function.value) != "get_ipython()" or node.value.keywords:
        return None
    texts = [item.value for item in arguments if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    kind = _METHODS.get(function.attr)
    wanted = {"run_line_magic": 2, "show_usage": 0}.get(function.attr, 1)
    if kind is None or len(texts) != wanted or len(arguments) != wanted:
        return None
    name, argument = ["", "", *texts][-2:] if wanted < 2 else texts
    if kind == "line" and not name:
        name, _, argument = argument.lstrip("%").partition(" ")
    return SyntaxPiece(1, 1, "", kind, name, argument)


# ----------------------------------------------------------------------------------------------------------------- writing


class _Refused(Exception):  # noqa: N818 - no error of the program
    """Why a magic can't be in a script."""


class _LeftOut(Exception):  # noqa: N818 - no error of the program
    """Why a magic is left out; without a text nobody needs to know."""


class _CellTranslator:
    """One cell while it is translated."""

    def __init__(self, originals: Sequence[str], *, keep_installs: bool, on_ranks: bool) -> None:
        self._originals = originals
        self._keep_installs, self._on_ranks = keep_installs, on_ranks
        self._of_session: list[Remark] = []

    def lines(self, lines: Sequence[str], calls: Iterable[SyntaxPiece]) -> PlainCell:
        """The cell where calls of IPython stand in its lines."""
        placed: list[tuple[SyntaxPiece, str | None]] = []
        notes: list[Remark] = []
        problems: list[Remark] = []
        for call in calls:
            text = None
            try:
                text = self._command(call) if call.kind in {"system", "getoutput"} else self._line(call)
            except _LeftOut as why:
                notes += [Remark(call.first, str(why))] if str(why) else []
            except _Refused as why:
                problems.append(Remark(call.first, str(why)))
            placed.append((call, text))
        written = list(lines)
        # from right to left: a line may have several calls
        for call, text in sorted(placed, key=lambda item: (item[0].first, len(item[0].before)), reverse=True):
            after = written[call.last - 1][len(lines[call.last - 1]) - len(call.after) :] if call.after else ""
            written[call.first - 1 : call.last] = self._placed(replace(call, after=after), text)
        source = "\n".join(written)
        problems = problems or [*wrong_python(source)]
        return PlainCell(source, tuple(notes), tuple(problems), on_ranks=tuple(self._of_session))

    def _placed(self, call: SyntaxPiece, text: str | None) -> list[str]:
        """As many lines as the call had; what is left out stays as a comment."""
        originals = self._originals[call.first - 1 : call.last]
        more = len(originals) - 1
        if text is not None:
            return [f"{call.before}{text}{call.after}", *["#"] * more]
        comments = [f"# {line.strip()}" for line in originals]
        if call.after.strip() and not call.after.lstrip().startswith("#"):
            return [f"{call.before}None{call.after}", *["#"] * more]
        if call.before.strip():
            return [f"{call.before}None  {comments[0]}", *comments[1:]]
        return [f"{call.before}pass  {comments[0]}" if call.before else comments[0], *comments[1:]]

    def _line(self, call: SyntaxPiece) -> str:
        name, text = call.name, call.text
        if call.kind == "usage":
            raise _LeftOut(f"? was left out: {_SHOWS}")
        if name.startswith("%"):
            raise _Refused(
                f"%{name} is below other lines, but IPython takes it in the first line of a cell only. "
                "Move it to the top, or give it a cell of its own."
            )
        self._check_magic(f"%{name}", name)
        if name == ACCELERATE:
            self._check_accelerate(call)
        if name in _LEFT_OUT:
            shown = f"{text}?" if name in {"pinfo", "pinfo2", "psearch"} else f"%{name}"
            raise _LeftOut(f"{' '.join(shown.split())} was left out: {_LEFT_OUT[name]}")
        if name == "env" and not text.strip() and not call.before.strip():
            raise _LeftOut("%env was left out: it only lists the environment.")
        is_of_the_page = name in {"load_ext", "reload_ext"} and text.strip() in _EXTENSIONS_OF_THE_PAGE
        if is_of_the_page or (name == "matplotlib" and text.strip().lower() in _BACKENDS_OF_THE_PAGE):
            raise _LeftOut
        if name == "run" and re.match(r"\s*(-\w+\s+)*-\w*[db]", text):
            raise _Refused(f"%run -d starts a debugger. {_OTHERWISE}")
        if name in _INSTALLERS:
            self._check_install(f"%{name} {text}", f"{name} {text}")
        if name == "time" and (problems := plain(text, keep_installs=self._keep_installs).problems):
            raise _Refused(problems[0].text)
        return f"nb_shell.line({literal(name)}, {literal(text)})"

    def _check_accelerate(self, call: SyntaxPiece) -> None:
        """Keep a line of `%accelerate` that a script has a use for."""
        shown = f"%{ACCELERATE} {call.text}".rstrip()
        if self._on_ranks:
            raise _Refused(f"%{ACCELERATE} is in a %%{ACCELERATE} cell, where no rank knows it.")
        if call.text.strip() in _HELP:
            raise _LeftOut(f"{shown} was left out.")
        try:
            command, rest = read_line(call.text)
            if command.word in _UNUSED and call.before.strip():
                raise _Refused(f"{call.before.strip()} {shown} keeps what a script does not have. Leave it out.")
            if command.word in _UNUSED:
                why = _UNUSED[command.word]
                raise _LeftOut(f"{shown} was left out{f': {why}' if why else ''}.")
            if command.word in {"push", "pull"}:
                names_of(" ".join(read(rest, command.flags, shown)[1]), f"%{ACCELERATE} {command.word}")
            if command.word == "run":
                call_in(rest)
            if command.word == "restart":
                where = f"%{ACCELERATE} restart"
                refuse(read(rest, command.flags, where)[1], where, "It takes flags of settings only.")
        except AccelerateNbError as error:
            raise _Refused(f"{str(error).removesuffix('.')}.") from None
        self._of_session.append(Remark(call.first, call.text))
        if command.word == "stop":
            raise _LeftOut

    def _command(self, call: SyntaxPiece) -> str:
        """`!command`, or `x = !command`, which gives the lines that it prints."""
        command = call.text
        self._check_install(f"!{command.strip()}", command)
        if call.kind == "getoutput":
            return f"nb_shell.capture({literal(command)})"
        if re.fullmatch(r"\s*cd\b[^&|;\n]*", command):
            why = "it changes the folder of its own shell only; %cd changes the script's."
            raise _LeftOut(f"!{command.strip()} was left out: {why}")
        if pip := _PIP.fullmatch(command):
            # of the Python that runs the script
            return f'nb_shell.line("pip", {literal(pip["arguments"])})'
        return f"nb_shell.run({literal(command)})"

    def _check_install(self, shown: str, command: str) -> None:
        """Leave a command out of whose parts each installs packages."""
        # what is in quotes or in a comment begins no other command
        command = _QUOTED.sub(lambda found: re.sub("[;&|]", "", found[0]), command)
        parts = [part for part in re.split(r"&&|\|\||;|\n", command) if part.strip() and part.lstrip()[:1] != "#"]
        if parts and all(map(_INSTALLS.match, parts)) and not self._keep_installs:
            raise _LeftOut(f"{' '.join(shown.split())} was left out: {_NO_INSTALL}")

    def _check_magic(self, shown: str, name: str) -> None:
        if name in _INTERACTIVE:
            raise _Refused(f"{shown} means nothing outside of a notebook. {_OTHERWISE}")

    def cell(self, magic: SyntaxPiece, lines: Sequence[str]) -> PlainCell:
        """The cell where a cell magic begins it."""
        above, below = list(lines[: magic.first - 1]), list(lines[magic.first :])
        shown = f"%%{magic.name}"
        # editors take what begins with `# %%` for a cell
        comments = [*above, f"# was: {shown} {magic.text}".rstrip(), *(f"# {line}".rstrip() for line in below)]
        left_out = PlainCell("\n".join(comments), left_out=True)
        try:
            inner = self._below(magic, below, shown)
        except _LeftOut as why:
            return replace(left_out, notes=(Remark(magic.first, str(why)),) if str(why) else ())
        except _Refused as why:
            return replace(left_out, problems=(Remark(magic.first, str(why)),))
        notes = tuple(Remark(note.line + magic.first, note.text) for note in inner.notes)
        problems = tuple(Remark(problem.line + magic.first, problem.text) for problem in inner.problems)
        if problems:
            return PlainCell("\n".join(lines), problems=problems)
        if magic.name in CODE_MAGICS and not ast.parse(inner.source).body:
            # nothing is left of it
            return PlainCell("\n".join([*comments[: magic.first], inner.source]), notes=notes)
        opening, closing = _text_over_lines(inner.source)
        opening = f"nb_shell.cell({literal(magic.name)}, {literal(magic.text)}, {opening}"
        source = "\n".join([*above, opening, f"{closing})"])
        lines_of_session = tuple(replace(item, line=item.line + magic.first) for item in inner.on_ranks)
        if magic.name == ACCELERATE:
            lines_of_session = (Remark(magic.first, f"%%{magic.text}"),)
        return PlainCell(source, notes, on_ranks=lines_of_session)

    def _below(self, magic: SyntaxPiece, below: Sequence[str], shown: str) -> PlainCell:
        """What the magic is given: code as the script can run it, and any other text as it is."""
        if magic.name == ACCELERATE and _HELP & {*magic.text.split()}:
            raise _LeftOut
        if not any(line.strip() for line in below):
            raise _Refused(f"{shown} has nothing below it. {_OTHERWISE}")
        if magic.name in _SHOWN_CELLS:
            raise _LeftOut(f"{shown} was left out: {_SHOWS}")
        self._check_magic(shown, magic.name)
        text = "\n".join(below)
        if magic.name in {"bash", "sh"}:
            self._check_install(shown, text)
        if magic.name == "time" and magic.text.replace("--no-raise-error", "").strip():
            raise _Refused(f"%%time takes no statement in its own line when there is code below it. {_OTHERWISE}")
        if magic.name not in {*CODE_MAGICS, ACCELERATE}:
            return PlainCell(text)
        unused: dict[str, bool] = {}
        if magic.name == ACCELERATE:
            try:
                options, _ = read_cell_line(magic.text)
            except AccelerateNbError as error:
                raise _Refused(str(error)) from None
            unused = {
                "--background was left out: a script's cells run one after the other.": options.background,
                "--timeout was left out: a script's cells run one after the other.": options.timeout is not None,
                "--detach was left out: pass it to accelerate-nb launch, for all of the script.": options.detach,
            }
        notes = (Remark(0, text) for text, is_given in unused.items() if is_given)
        inner = plain(text, keep_installs=self._keep_installs, on_ranks=self._on_ranks or magic.name == ACCELERATE)
        return replace(
            inner, notes=(*notes, *inner.notes), problems=inner.problems or tuple(wrong_python(inner.source))
        )


_OTHERWISE = "Tag the cell `skip-script`, or write it as Python."


def _text_over_lines(text: str) -> tuple[str, str]:
    """A text as Python has it, on the same lines: what opens it on the line above them, and the lines with what closes it."""
    for mark in ('"""', "'''"):
        if mark not in text and not text.endswith((mark[0], "\\")):
            # a raw text can't leave its first line break out
            return (f"{mark}\\", f"{text}{mark}") if "\\" not in text else (f"r{mark}", f"{text}{mark}[1:]")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"""\\', f'{escaped}"""'


def wrong_python(source: str) -> Iterator[Remark]:
    """The syntax error of a cell, with a suggestion."""
    if is_too_deep(source):
        yield _TOO_DEEP
        return
    try:
        compile(source, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        number = error.lineno or 1
        line = source.split("\n")[number - 1].strip()
        word = re.match(r"\w+", line)
        suggestion = f" `{word[0]}` is a magic: write `%{line}`." if word and word[0] in MAGICS else ""
        short = line if len(line) <= _WIDEST else f"{line[: _WIDEST - 3]}..."
        yield Remark(number, f"`{short}` is no Python: {error.msg.rstrip('.?')}.{suggestion}")
    except ValueError as error:
        yield Remark(1, f"the cell is no Python: {error}.")
