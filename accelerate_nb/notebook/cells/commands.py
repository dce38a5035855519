"""Commands of `%accelerate`: inspect a session, stop it, send values to it and fetch them."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from accelerate_nb.config import magic_args
from accelerate_nb.config.formats import explicit_settings
from accelerate_nb.config.rank_lists import of_ranks
from accelerate_nb.errors import WorkerError, titled
from accelerate_nb.events.event_types import OVER
from accelerate_nb.events.run_folder import shown_path
from accelerate_nb.failures.rank_result import left_out_text
from accelerate_nb.notebook.cells.cell_source import shown_as
from accelerate_nb.notebook.cells.session_manager import CellOutput, NotebookSession
from accelerate_nb.notebook.display.text_output import print_message
from accelerate_nb.notebook.host import NotebookHost
from accelerate_nb.notebook.runs import ComparedRuns, compared_runs, runs
from accelerate_nb.reports.run_table import RunTable
from accelerate_nb.reports.summary import device_text
from accelerate_nb.reports.text_format import aligned, counted, time_text
from accelerate_nb.user_warnings import warn_user


@dataclass(frozen=True)
class SessionCommands:
    """The commands of one notebook."""

    shell: Any
    kept: NotebookSession
    host: Callable[[], NotebookHost]

    def run(self, line: str) -> Any:
        """Run the command of a line; an empty line means `status`."""
        __tracebackhide__ = True
        command, rest = magic_args.read_line(line)
        if not command.usage and not command.flags:
            magic_args.refuse(rest.split(), f"%accelerate {command.word}", "It takes nothing.")
        return getattr(self, f"_{command.word}")(rest, command)

    # ------------------------------------------------------------------------------------------------ inspecting, ending

    def _status(self, rest: str, command: magic_args.LineCommand) -> SessionStatus:
        return SessionStatus.of(self.kept)

    def _stop(self, rest: str, command: magic_args.LineCommand) -> None:
        print_message("The session has ended." if self.kept.stop() else "There is no session to stop.")

    def _restart(self, rest: str, command: magic_args.LineCommand) -> None:
        given, words = magic_args.read(rest, command.flags, "%accelerate restart")
        magic_args.refuse(words, "%accelerate restart", "It takes flags of settings only.")
        self.kept.ready(given, restart=True)

    def _stacks(self, rest: str, command: magic_args.LineCommand) -> None:
        print_message(self.kept.there("%accelerate stacks").stacks())

    def _logs(self, rest: str, command: magic_args.LineCommand) -> None:
        given, words = magic_args.read(rest, command.flags, "%accelerate logs")
        magic_args.refuse(words, "%accelerate logs", "Choose a rank by --rank.")
        options = magic_args.LogsOptions(**given)
        # also of a session that has ended
        session = self.kept.session or self.kept.there("%accelerate logs")
        for rank in magic_args.one_rank(options.rank, session.size) or session.view.ranks:
            count = session.view.line_count_of(rank)
            tail = session.view.tail(rank, options.lines)
            print_message(
                f"rank {rank}: {f'the last {len(tail)} of ' if count > len(tail) else ''}{counted(count, 'line')}"
            )
            print_message("\n".join(f"  {line.text}" for line in tail))
        print_message(f"All of it: {shown_path(session.folder)}")

    def _wait(self, rest: str, command: magic_args.LineCommand) -> None:
        __tracebackhide__ = True
        if self.kept.background is None:
            print_message("No cell runs in the background.")
            return
        self.kept.background.wait()

    def _interrupt(self, rest: str, command: magic_args.LineCommand) -> None:
        background = self.kept.background
        if background is None or background.done:
            print_message("No cell runs in the background.")
            return
        background.interrupt()
        print_message(f"{background.name} was interrupted.")

    def _runs(self, rest: str, command: magic_args.LineCommand) -> RunTable | ComparedRuns:
        __tracebackhide__ = True
        folder, names = self.kept.settings.get("folder"), magic_args.words_of(rest, "%accelerate runs")
        return compared_runs(names, folder) if names else runs(folder=folder)

    def _config(self, rest: str, command: magic_args.LineCommand) -> Any:
        from accelerate_nb.notebook.picker.form import config_picker, initial_settings

        picker = config_picker()
        # also a default, where the environment or the file has another value
        self.kept.picked = lambda: explicit_settings(picker.value, initial_settings(os.environ).settings)
        follows = "" if self.kept.session is None else " (%accelerate restart starts it)"
        print_message(f"These settings hold for the next session{follows}; a flag of its cell wins.")
        return picker

    # -------------------------------------------------------------------------------------------------- values, calls

    def _push(self, rest: str, command: magic_args.LineCommand) -> None:
        values = magic_args.read_push(rest, self.shell.user_ns, "the notebook")
        session = self.kept.ready()
        session.push(values)
        where = of_ranks(session.ranks)
        print_message("\n".join(f"{name} is on {where} now: {described(value)}" for name, value in values.items()))

    def _pull(self, rest: str, command: magic_args.LineCommand) -> None:
        __tracebackhide__ = True
        options, names = magic_args.read_pull(rest)
        session = self.kept.there("%accelerate pull")
        ranks = magic_args.pulled_ranks(options, session.size)
        try:
            pulled = session.pull(names, ranks=ranks)
        except WorkerError as error:
            if session.alive and error.failures:
                # the missing names in one sentence
                shown_as(error, [titled(self.shell, type(error).__name__, error.failures[0].message)])
            raise
        for name in names:
            values = [pulled[rank][name] for rank in ranks]
            self.shell.user_ns[name] = values if options.all else values[0]
            what = f"a list of {len(values)}, the first: " if options.all else ""
            print_message(f"{name} is in the notebook now, from {of_ranks(ranks)}: {what}{described(values[0])}")

    def _run(self, rest: str, command: magic_args.LineCommand) -> Any:
        __tracebackhide__ = True
        unknown = (
            "the notebook does not know. Define it in a cell of the notebook (or with %%accelerate --local); a call of what only "
            "the ranks know goes into a %%accelerate cell."
        )
        function, args, kwargs = magic_args.evaluated_call(rest, self.shell.user_global_ns, unknown)
        session = self.kept.ready()
        template = session.config.launching.log_line_prefix_template
        run = session.call(function, args, kwargs, front_end=CellOutput(self.host().screen, session.ranks, template))
        first = run.wait()[0]
        if text := left_out_text(run.name, {first.rank: first.left_out}):
            warn_user(text)
        return first.value


def described(value: Any) -> str:
    """A short description of a value."""
    shape, type_name = getattr(value, "shape", None), type(value).__name__
    if isinstance(shape, tuple) and shape and hasattr(value, "dtype"):
        return f"{type_name} of shape {tuple(shape)}, {str(value.dtype).removeprefix('torch.')}"
    # the value's own methods may fail, and a tensor without dimensions has no length
    with suppress(Exception):
        text = repr(value)
        if len(text) <= 60 and "\n" not in text:
            return text
        return f"{type_name} of length {len(value)}"
    return type_name


# -------------------------------------------------------------------------------------------------------------- status


@dataclass(frozen=True)
class SessionStatus:
    """The state of a session; a notebook shows it as a table, a terminal as text."""

    headline: str
    facts: tuple[tuple[str, str], ...] = ()
    # with the head of their table
    ranks: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, kept: NotebookSession) -> SessionStatus:
        """The status of the notebook's session."""
        session = kept.session
        if session is None:
            return cls("No session. A cell with %%accelerate starts one.")
        state = "is ready" if not session.busy else "is busy"
        if not session.alive:
            reason = f": {str(session.error).partition(chr(10))[0]}" if session.error is not None else ""
            state = f"has ended{reason}"
        facts = [
            ("where", session.why),
            (
                "since",
                f"{time.strftime('%H:%M:%S', time.localtime(session.started))} ({time_text(time.time() - session.started)})",
            ),
            ("settings", ", ".join(f"{name}={value}" for name, value in kept.settings.items()) or "the defaults"),
            ("output", shown_path(session.folder)),
        ]
        facts += [
            ("runs", f"{item.name} on {of_ranks(item.ranks)}, for {time_text(time.time() - item.started)}")
            for item in session.busy
        ]
        busy = {rank: item.name for item in session.busy for rank in item.ranks}
        rows = [("rank", "state", "device", "lines")]
        for glance in session.view.glances():
            does = f"runs {busy[glance.rank]}" if glance.rank in busy else "waits"
            devices = ", ".join(device_text(device) for device in glance.devices.values())
            is_over = glance.state in OVER
            rows.append((str(glance.rank), glance.state if is_over else does, devices or "-", f"{glance.line_count:,}"))
        return cls(f"A session of {counted(session.size, 'process')} {state}", tuple(facts), tuple(rows))

    def __repr__(self) -> str:
        width = max((len(name) for name, _ in self.facts), default=0)
        facts = [f"{name.ljust(width)}  {text}" for name, text in self.facts]
        return "\n".join([self.headline, *(f"  {line}" for line in (*facts, *aligned(self.ranks)))])

    def _repr_html_(self) -> str:
        facts = "".join(
            f'<div style="opacity:.65">{html.escape(name)}</div><div>{html.escape(text)}</div>'
            for name, text in self.facts
        )
        cells = "".join(
            f'<div style="padding-right:2em">{html.escape(cell)}</div>' for row in self.ranks for cell in row
        )
        grid = "display:grid;column-gap:1em;row-gap:.15em;margin:.4em 0;justify-content:start;"
        table = f'<div style="{grid}grid-template-columns:repeat(4,max-content)">{cells}</div>' if cells else ""
        return (
            f"<div><b>{html.escape(self.headline)}</b>"
            f'<div style="{grid}grid-template-columns:max-content auto">{facts}</div>{table}</div>'
        )
