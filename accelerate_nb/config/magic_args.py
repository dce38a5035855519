"""Flags and commands of `%%accelerate` and `%accelerate`, declared and read like the settings."""

import ast
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from accelerate_nb.config.formats import read_words
from accelerate_nb.config.rank_lists import named
from accelerate_nb.config.run_config import all_settings
from accelerate_nb.config.settings import Setting, setting, settings
from accelerate_nb.config.value_types import did_you_mean
from accelerate_nb.errors import ConfigurationError

# Settings of a function that runs to its end, which mean nothing to a session. `timeout` is the cell's own.
_OF_LAUNCHES = frozenset({"timeout", "results", "detach", "max_restarts", "restart_delay", "monitor_interval"})

# Settings that a session adopts from the next cell on, without a restart: nothing of them is in the workers.
ADJUSTABLE_SETTINGS = frozenset({
    "name", "tags", "panel", "report", "hang_warning_after", "stop_grace_period", "log_line_prefix_template",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CellOptions:
    """Options of one `%%accelerate` cell."""

    ranks: str | None = setting(None, help="The ranks that run the cell, such as 0,2-3; without it, all of them.")
    restart: bool = setting(False, help="Restart the session first; its variables are gone then.", deprecated=["fresh"])
    timeout: float | None = setting(None, minimum=0, help="Seconds that the cell may take before it is interrupted.")
    background: bool = setting(False, help="Return at once; the output continues under the cell.")
    detach: bool = setting(
        False,
        help="Run the cell in processes of its own, which outlive the notebook (`%accelerate runs`); it begins with the "
        "notebook's variables that it names.",
    )
    local: bool = setting(
        False, help="Run the cell in the notebook too, first: for imports and definitions.", deprecated=["also_here"]
    )
    displays: Literal["main", "all"] = setting(
        "main", help="Whose figures and tables are shown: those of the first rank ('main'), or of every rank ('all')."
    )


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    """Options of `%accelerate pull`."""

    rank: int | None = setting(None, minimum=0, help="The rank whose value is fetched; without it, the first one's.")
    all: bool = setting(False, help="Fetch every rank's value, as a list in rank order.")


@dataclass(frozen=True, kw_only=True)
class LogsOptions:
    """Options of `%accelerate logs`."""

    rank: int | None = setting(None, minimum=0, help="The rank whose lines are shown; without it, all ranks'.")
    lines: int = setting(20, minimum=1, help="Number of last lines of each rank.")


@cache
def session_flags() -> tuple[Setting, ...]:
    """The settings that a session can be started with."""
    return tuple(item for item in all_settings() if item.name not in _OF_LAUNCHES)


@cache
def cell_flags() -> tuple[Setting, ...]:
    """All flags of `%%accelerate`."""
    return (*settings(CellOptions), *session_flags())


@dataclass(frozen=True)
class LineCommand:
    """A command of `%accelerate`: its word, its arguments and its help."""

    word: str
    usage: str
    help: str
    flags: tuple[Setting, ...] = ()


@cache
def line_commands() -> tuple[LineCommand, ...]:
    """All commands of `%accelerate`."""
    return (
        LineCommand("status", "", "How the session is: its ranks, what they do, its settings and its folder."),
        LineCommand("stop", "", "End the session; its variables are gone."),
        LineCommand(
            "restart", "[flags]", "Restart the session, with the same settings and these flags.", session_flags()
        ),
        LineCommand("push", "x y", "Give variables of the notebook to every rank."),
        LineCommand(
            "pull", "z", "Fetch variables of a rank into the notebook; tensors come to the CPU.", settings(PullOptions)
        ),
        LineCommand(
            "run", "fn(args)", "Call a function of the notebook on every rank; gives what it returned on the first."
        ),
        LineCommand("wait", "", "Wait for the cell that runs in the background."),
        LineCommand("interrupt", "", "Interrupt the cell that runs in the background; the session goes on."),
        LineCommand("stacks", "", "Where every rank is at this moment."),
        LineCommand("logs", "", "The last lines of the ranks, also those that no cell shows.", settings(LogsOptions)),
        LineCommand(
            "runs", "[A B]", "All runs that are kept: what goes on, and what is over; with names, these runs compared."
        ),
        LineCommand("config", "", "Pick the settings of the next session in a form."),
    )


def read_line(line: str) -> tuple[LineCommand, str]:
    """The command of an `%accelerate` line, and the text after its word; an empty line means `status`."""
    word, _, rest = line.strip().partition(" ")
    known = {line_command.word: line_command for line_command in line_commands()}
    if word and word not in known:
        suggestion = did_you_mean(word, known, "Leave it out to see the status.")
        raise ConfigurationError(f"%accelerate was given {word!r}. {suggestion} It knows {', '.join(known)}.")
    return known[word or "status"], rest.strip()


def read_cell_line(line: str) -> tuple[CellOptions, dict[str, Any]]:
    """The options of a cell, and the settings of its session, from the cell's first line."""
    given, rest = read(line, cell_flags(), "%%accelerate")
    refuse(rest, "%%accelerate", "It takes flags only; the code begins on the next line.")
    option_names = CellOptions.__dataclass_fields__
    options = CellOptions(**{name: value for name, value in given.items() if name in option_names})
    return options, {name: value for name, value in given.items() if name not in option_names}


def read(line: str, flags: Sequence[Setting], where: str) -> tuple[dict[str, Any], list[str]]:
    """The values of a line's flags, by the names of their settings, and the words that are no flags."""
    return read_words(words_of(line, where), flags, where)


def words_of(line: str, where: str) -> list[str]:
    """The words of a line up to its comment; a word in quotation marks may begin with `#`."""
    text, words = io.StringIO(line), list[str]()
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        while (rest := line[text.tell() :].lstrip()) and not rest.startswith("#"):
            words.append(next(lexer))
    except ValueError:
        raise ConfigurationError(f"{where} was given {line!r}, where a quotation mark is open. Close it.") from None
    return words


def refuse(words: Sequence[str], where: str, advice: str) -> None:
    """Raise `ConfigurationError` if any words are left over."""
    if words:
        raise ConfigurationError(f"{where} was given {' '.join(words)!r}, which is no flag. {advice}")


def names_of(text: str, where: str) -> list[str]:
    """The names of variables that a text holds: `x, y` or `x y`."""
    names = text.replace(",", " ").split()
    wrong = next((name for name in names if not name.isidentifier()), None)
    if not names or wrong is not None:
        found = "no name" if wrong is None else repr(wrong)
        raise ConfigurationError(f"{where} was given {found}. Write names of variables, such as {where} x y.")
    return names


def read_push(text: str, names: Mapping[str, Any], who: str) -> dict[str, Any]:
    """The variables that `%accelerate push` was given, among these names of `who`."""
    wanted = names_of(text, "%accelerate push")
    if missing := next((name for name in wanted if name not in names), None):
        suggestion = did_you_mean(missing, (name for name in names if not name.startswith("_")), "Define it first.")
        raise ConfigurationError(f"%accelerate push was given {missing}, which {who} does not know. {suggestion}")
    return {name: names[name] for name in wanted}


def read_pull(text: str) -> tuple[PullOptions, list[str]]:
    """The options of `%accelerate pull`, and the names of variables that it was given."""
    given, words = read(text, settings(PullOptions), "%accelerate pull")
    return PullOptions(**given), names_of(" ".join(words), "%accelerate pull")


def call_in(text: str) -> ast.Call:
    """The call that `%accelerate run` was given."""
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        call = ast.Constant(None)
    if not isinstance(call, ast.Call):
        raise ConfigurationError(
            f"%accelerate run was given {text!r}, which is no call. Write one, such as %accelerate run train(3, rate=0.1)."
        )
    return call


def evaluated_call(text: str, names: Mapping[str, Any], unknown: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function, the arguments and the named ones of a call, from these names; `unknown` ends the error without the function."""
    __tracebackhide__ = True
    call = call_in(text)

    def value(node: ast.expr, **more: Any) -> Any:
        code = compile(ast.fix_missing_locations(ast.Expression(node)), "<%accelerate run>", "eval")
        return eval(code, {**names, **more})

    try:
        function = value(call.func)
    except NameError:
        raise ConfigurationError(f"%accelerate run was given {ast.unparse(call.func)}, which {unknown}") from None
    collect = ast.Call(ast.Name("_collect_", ast.Load()), call.args, call.keywords)
    args, kwargs = value(collect, _collect_=lambda *args, **kwargs: (args, kwargs))
    return function, args, kwargs


def pulled_ranks(options: PullOptions, size: int) -> tuple[int, ...]:
    """The ranks, of `size`, whose values `%accelerate pull` fetches."""
    rank = one_rank(options.rank, size)
    return tuple(range(size)) if options.all else rank or (0,)


def one_rank(rank: int | None, size: int) -> tuple[int, ...]:
    """The requested rank of `size`, if any."""
    if rank is not None and rank >= size:
        raise ConfigurationError(
            f"--rank was given {rank}, and the session has the ranks {named(range(size))}. Choose among them."
        )
    return () if rank is None else (rank,)


def ranks_of(text: str | None, size: int | None) -> tuple[int, ...] | None:
    """The ranks, of `size` where that is known, that a text such as `0,2-3` names; `None`, or `all`, means all."""
    if text is None or text.strip().lower() == "all":
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            raise ConfigurationError(f"--ranks was given {text!r}. Write numbers and ranges of them, such as 0,2-3.")
        part_ranks = range(int(first), int(last if dash else first) + 1)
        if size is not None and part_ranks and part_ranks[-1] >= size:
            raise ConfigurationError(
                f"--ranks was given {text!r}, and the session has the ranks {named(range(size))}. Choose among them."
            )
        found.update(part_ranks)
    if not found:
        raise ConfigurationError(
            f"--ranks was given {text!r}, which names none. Write the lower number of a range first."
        )
    return tuple(sorted(found))
