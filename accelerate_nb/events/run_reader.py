"""A run read back from the folder that it left, or still writes to, found by its number, its name or its folder."""

import difflib
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, cast, get_args

from msgspec import structs

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.events import event_types
from accelerate_nb.events.event_codec import from_line
from accelerate_nb.events.line_reader import LineClassifier, shown_lines
from accelerate_nb.events.run_folder import ATTEMPT_FOLDER, folders, is_drawable, is_over, status_of
from accelerate_nb.events.run_state import RunState
from accelerate_nb.events.terminal_lines import plain_name

# How a person names a run: by its number in the list of runs, its name, its folder, or what the library has of these.
RunName: TypeAlias = int | str | os.PathLike[str]

# More ranks no run has; a time after this, in seconds since 1970, is none.
MOST_RANKS = 100_000
_LATEST = 10**11
# Of a run whose process is on another host is nothing known once its folder has not changed for so long, in seconds.
_STALE_AFTER = 86_400
# What a view keeps of each rank, in lines and in bytes.
_LINES, _BYTES = 1000, 4_000_000
_AT_ONCE = 1 << 20
# What a default name holds of a run's arguments.
_MOST_NAMED, _LONGEST_VALUE, _LONGEST_NUMBER = 3, 24, 9
# How `new_folder` names them.
_NAMED = re.compile(r"(\d{4}-\d\d-\d\d_\d{6})_(.*)")
_LOG = re.compile(r"rank_(\d+)\.log")


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run as its folder describes it; times are in seconds since 1970."""

    folder: Path
    name: str
    why: str
    state: event_types.State
    started: float
    # not known of a run whose launcher died, which has failed
    ended: float | None
    ranks: int
    # what its wait raised, or would have
    error: str
    restarts: int = 0
    is_detached: bool = False
    # what its status says; a run whose launcher died has failed all the same
    last_state: event_types.State = "failed"
    # the bar that moves, with what is done of how much: of a detached run
    progress: tuple[str, float, float] | None = None
    # the newest number of each metric, what it is of several ranks (`mean of 2`), and a sparkline of the leading one by its name
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_of: Mapping[str, str] = field(default_factory=dict)
    curve: tuple[str, str] | None = None
    # the settings that were not their defaults
    settings: Mapping[str, Any] = field(default_factory=dict)
    # what was launched, and its arguments as texts, where they are known
    function: str = ""
    arguments: Mapping[str, str] | None = None
    tags: tuple[str, ...] = ()
    # when something was last written of a run that goes on by its status on another host, where that is long ago
    stale_since: float | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the process that conducted it has gone without recording an end."""
        return self.is_over and self.last_state in event_types.GOING_ON

    @property
    def is_over(self) -> bool:
        return self.state in event_types.OVER


def kept_runs(parent: Path) -> list[SavedRun]:
    """The runs whose folders are in `parent`, newest first; one without a name is called by its function and what differs."""
    found = (kept_run(parent / name) for name in folders(parent))
    runs = sorted((item for item in found if item is not None), key=lambda item: item.started, reverse=True)
    differing = {
        function: differing_arguments(run.arguments for run in runs if run.function == function)
        for function in {run.function for run in runs}
    }
    return [
        run
        if "name" in run.settings
        else replace(run, name=default_name(run.name, run.arguments, differing[run.function]))
        for run in runs
    ]


def differing_arguments(every: Iterable[Mapping[str, str] | None]) -> list[str]:
    """The arguments in which runs of a function differ, also by having one or not; runs of earlier versions don't count."""
    known = [arguments for arguments in every if arguments is not None]
    names = dict.fromkeys(name for arguments in known for name in arguments)
    return [name for name in names if len({arguments.get(name) for arguments in known}) > 1]


def default_name(function: str, arguments: Mapping[str, str] | None, differing: Iterable[str]) -> str:
    """The name of a run that was given none: `train lr=0.1`."""
    given = [name for name in differing if name in (arguments or {})]
    texts = ((name.lstrip("-"), argument_text(arguments, name)) for name in given)
    most = _LONGEST_VALUE
    parts = [f"{name}={text if len(text) <= most else f'{text[: most - 1]}…'}" for name, text in texts]
    return " ".join([function, *parts[:_MOST_NAMED], *(["…"] if len(parts) > _MOST_NAMED else [])])


def argument_text(arguments: Mapping[str, str] | None, name: str) -> str:
    """An argument's value as a person writes it: no quotes, 0.30000000000000004 as 0.3, empty where none was given."""
    value = (arguments or {}).get(name, "")
    if len(value) > _LONGEST_NUMBER and "." in value:
        with suppress(ValueError):
            return f"{float(value):g}"
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def kept_run(folder: Path) -> SavedRun | None:
    """The run that a folder is of; `None` where nothing in it is of a run."""
    status = status_of(folder)
    if status is None and not (folder / "events.jsonl").is_file():
        return None
    facts = status or {}
    began, name = _from_name(folder)
    is_known = facts.get("state") in get_args(event_types.State)
    last_state = cast(event_types.State, facts["state"]) if is_known else "failed"
    is_lost = last_state in event_types.GOING_ON and is_over(folder, status)
    state: event_types.State = "failed" if is_lost else last_state
    # a run of an earlier version has only the time of its status, which was written at its end
    ended = _number(facts.get("ended", facts.get("time")), math.nan)
    has_end = state == facts.get("state") and state not in event_types.GOING_ON and not math.isnan(ended)
    error = facts.get("error") or ""
    if not error and state == "failed" != facts.get("state"):
        process = f" ({facts['pid']})" if "pid" in facts else ""
        error = f"the process that launched it{process} has gone, and the run's end was not recorded"
    changed = None if state in event_types.OVER or facts.get("host") == socket.gethostname() else _changed(folder)
    ranks = facts.get("ranks", -1)
    metrics = facts.get("metrics", {})
    return SavedRun(
        folder=folder,
        name=facts.get("name") or name,
        why=facts.get("why", ""),
        state=state,
        started=_number(facts.get("started"), began),
        ended=ended if has_end else None,
        ranks=ranks if 0 <= ranks <= MOST_RANKS else len(rank_logs(folder)),
        error=error,
        restarts=int(_number(facts.get("restarts"), 0)),
        is_detached=bool(facts.get("detached")),
        last_state=last_state,
        progress=tuple(facts["progress"]) if facts.get("progress") else None,
        metrics={name: value for name, value in metrics.items() if is_drawable(value) or isinstance(value, float)},
        metrics_of=facts.get("metrics_of", {}),
        curve=tuple(facts["curve"]) if facts.get("curve") else None,
        settings=facts.get("settings", {}),
        function=facts.get("function") or facts.get("name") or name,
        arguments=facts.get("arguments"),
        tags=tags_of(facts),
        stale_since=changed if changed is not None and time.time() - changed > _STALE_AFTER else None,
    )


def tags_of(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """The tags in a run's status."""
    settings = facts.get("settings")
    text = settings.get("tags", "") if isinstance(settings, dict) else ""
    return tuple(plain_name(str(text)).split(",")) if text else ()


def view_of(run: SavedRun) -> RunState:
    """All that is kept of a run, as a front end reads it; lines and events that can't be read are left out."""
    # the two streams of a rank are one in its log, and lines bear no time there
    follower = RunFollower(run)
    follower.update()
    if run.is_over:
        follower.finish(run)
    return follower.view


class RunFollower:
    """The state of a run, read from its folder while another process writes there."""

    def __init__(self, run: SavedRun) -> None:
        self.view = RunState(run.ranks)
        self._folder, self._time = run.folder, run.ended or run.started
        self._events = _Tail(run.folder / "events.jsonl")
        self._logs: dict[int, LogFollower] = {}
        self._classifiers: dict[int, LineClassifier] = {}

    def update(self) -> None:
        """Take in what was written since the last call."""
        for line in self._events.new():
            event = None
            # cut off where its writer died, of a type that only a newer version knows, or with values that nobody can draw
            with suppress(ValueError, RecursionError):
                found = from_line(line)
                event = found if _is_sound(found) else None
            if event is None:
                self.view.unread += 1
            else:
                self.view.apply(event)
        logs = (rank_logs(folder) for folder in (*former_attempts(self._folder), self._folder))
        for rank in sorted({rank for found in logs for rank in found}):
            if rank not in self._logs:
                self._logs[rank] = LogFollower(rank, self._folder, _LINES, from_first=True)
                self._classifiers[rank] = LineClassifier()
            lines = self._logs[rank].new()
            if skipped := self._logs[rank].skipped:
                self.view.note_earlier(rank, skipped)
            self._apply_lines(rank, lines)
        # lines that come from now on are of now
        self._time = 0.0

    def _apply_lines(self, rank: int, lines: list[str]) -> None:
        when, meaning_of = self._time or time.time(), self._classifiers[rank].of
        for line in lines:
            self.view.apply(event_types.LogLine(rank, "stdout", line, when, meaning=meaning_of(line)))

    def finish(self, run: SavedRun) -> None:
        """Take in the last line of each rank, which may not have ended, and the end of a run whose launcher could not record it."""
        for rank, log in self._logs.items():
            self._apply_lines(rank, log.rest())
        if self.view.ended is None:
            ended = run.ended or _changed(run.folder) or run.started
            self.view.apply(event_types.StateChange(None, run.state, ended, run.error))


class _Tail:
    """The whole lines of a file as it grows."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def new(self, *, whole: bool = True) -> list[bytes]:
        """The whole lines since the last call, or what came after them, too."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                came = file.read()
        except OSError:
            return []
        if whole:
            came = came[: came.rfind(b"\n") + 1]
        self.offset += len(came)
        lines = came.split(b"\n")
        return lines if lines[-1] else lines[:-1]


class LogFollower:
    """Reads a rank's log as it grows, from its last lines on, through all attempts that follow."""

    # `skipped` counts lines before those of the last call; `from_first`: the last lines of each former attempt come first

    def __init__(self, rank: int, folder: Path, lines: int, *, from_first: bool = False) -> None:
        self.rank = rank
        self.skipped = 0
        self._folder, self._name, self._wanted = folder, f"rank_{rank}.log", lines
        self._attempt = 0 if from_first else len(former_attempts(folder))
        # of attempts that come later all lines are new
        self._later = -1 if from_first else 0
        self._tail = _Tail(folder / self._name, -1)

    def new(self) -> list[str]:
        """The whole lines since the last call; at the first call, the last ones that were there."""
        self.skipped = 0
        found: list[str] = []
        for former in former_attempts(self._folder)[self._attempt :]:
            self._tail.path = former / self._name
            found += [*self._whole(), *self.rest()]
            self._attempt += 1
            self._tail = _Tail(self._folder / self._name, self._later)
        return found + self._whole()

    def rest(self) -> list[str]:
        """What the rank wrote after its last whole line."""
        return shown_lines(self._tail.new(whole=False))

    def _whole(self) -> list[str]:
        if self._tail.offset >= 0:
            return shown_lines(self._tail.new())
        self._tail.offset = 0
        # lines before the file's last part are only counted
        with suppress(OSError), self._tail.path.open("rb") as file:
            left = file.seek(0, 2) - _BYTES
            file.seek(0)
            while left > 0 and (part := file.read(min(_AT_ONCE, left))):
                self.skipped += part.count(b"\n")
                self._tail.offset += len(part)
                left -= len(part)
        lines = self._tail.new()
        cut = max(0, len(lines) - self._wanted)
        self.skipped += cut
        return shown_lines(lines[cut:])


def _is_sound(event: event_types.Event) -> bool:
    """Whether the numbers of an event mean something; a metric and a display may have any."""
    rank, when = getattr(event, "rank", None), getattr(event, "time", 0.0)
    if not -_LATEST <= when <= _LATEST or not (rank is None or 0 <= rank < MOST_RANKS):
        return False
    if isinstance(event, event_types.Restart) and not 0 <= (event.ranks or 0) <= MOST_RANKS:
        return False
    return isinstance(event, (event_types.Metric, event_types.Display)) or is_drawable(structs.astuple(event))


def former_attempts(folder: Path) -> list[Path]:
    """The folders of the logs of a run's former attempts, oldest first."""
    found: list[Path] = []
    while (attempt := folder / ATTEMPT_FOLDER.format(len(found))).is_dir():
        found.append(attempt)
    return found


def rank_logs(folder: Path) -> dict[int, Path]:
    """The logs of all ranks that wrote something, in the order of ranks."""
    found = ((_LOG.fullmatch(path.name), path) for path in folder.glob("rank_*.log"))
    return dict(sorted((int(match[1]), path) for match, path in found if match is not None))


def _from_name(folder: Path) -> tuple[float, str]:
    """The start and the name of a run, from the name of its folder."""
    parts = _NAMED.fullmatch(folder.name)
    with suppress(ValueError, OverflowError):
        if parts is not None:
            return time.mktime(time.strptime(parts[1], "%Y-%m-%d_%H%M%S")), plain_name(parts[2])
    return _changed(folder) or 0.0, plain_name(folder.name if parts is None else parts[2])


def _changed(folder: Path) -> float | None:
    """The last time something was written to a run's folder, in seconds since 1970."""
    try:
        return max((path.stat().st_mtime for path in folder.iterdir()), default=folder.stat().st_mtime)
    except OSError:
        return None


def _number(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else otherwise


def find_run(word: RunName, parent: Path) -> SavedRun:
    """The run that a word means in `parent`, or a path; raises `ConfigurationError` where it means none, or several."""
    text = str(word) if isinstance(word, int) else os.fspath(word)
    if os.sep in text and (by_path := kept_run(Path(text).expanduser().absolute())) is not None:
        return by_path
    every = kept_runs(parent)
    if not every:
        raise ConfigurationError(f"The run {text!r} was requested, but there are no runs in {parent}.")
    chosen = chosen_of(text, every)
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        numbers = {item.folder: number for number, item in enumerate(every, 1)}
        listed = "\n".join(f"  {numbers[item.folder]:>3}  {item.folder.name}" for item in chosen[:8])
        raise ConfigurationError(
            f"{text!r} may mean any of {len(chosen)} runs. Name one by its number or its full name:\n{listed}"
        )
    names = [name for item in every for name in (item.folder.name, item.name)]
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.5)
    suggestion = f"Near to it {'is' if len(near) == 1 else 'are'} {', '.join(near)}. " if near else ""
    raise ConfigurationError(
        f"There is no run {text!r} among the {len(every)} that are kept. {suggestion}`accelerate-nb runs` lists them."
    )


def find_runs(words: Sequence[RunName], parent: Path, most: int) -> list[SavedRun]:
    """The runs that words mean, in their order: two different ones to `most`; raises `ConfigurationError` for any other number."""
    found = {run.folder.resolve(): run for run in (find_run(word, parent) for word in words)}
    if not 2 <= len(found) <= most:
        raise ConfigurationError(
            f"{len(found)} different {'run was' if len(found) == 1 else 'runs were'} named to be compared. Name 2 to {most} runs."
        )
    return list(found.values())


def chosen_of(word: str, every: Sequence[SavedRun]) -> list[SavedRun]:
    """The runs that a word may mean, of all that there are, newest first; exactly one where it is clear."""
    if word == "last":
        return list(every[:1])
    if word.isdecimal() and 1 <= int(word) <= len(every):
        return [every[int(word) - 1]]
    ways: tuple[Callable[[SavedRun], bool], ...] = (
        lambda item: word == item.folder.name,
        lambda item: word == item.name,
        lambda item: item.folder.name.startswith(word) or item.name.startswith(word),
    )
    return next((found for means in ways if (found := [item for item in every if means(item)])), [])
