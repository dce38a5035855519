"""`%%accelerate` and `%accelerate`: cells and lines that reach every rank of a session."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from accelerate_nb.config.magic_args import CellOptions, cell_flags, line_commands, ranks_of, read_cell_line
from accelerate_nb.config.settings import section_name
from accelerate_nb.errors import AccelerateNbError, ConfigurationError, WorkerError, mark_in_panel, titled
from accelerate_nb.launching.detached.run_host import launch_detached
from accelerate_nb.launching.run import Run
from accelerate_nb.launching.session import Session
from accelerate_nb.notebook.api import resolved
from accelerate_nb.notebook.cells import completion
from accelerate_nb.notebook.cells.cell_source import FIRST_LINE, CellCode, shown_as
from accelerate_nb.notebook.cells.commands import SessionCommands
from accelerate_nb.notebook.cells.completion import help_of
from accelerate_nb.notebook.cells.session_manager import CellOutput, NotebookSession
from accelerate_nb.notebook.display.select import front_end
from accelerate_nb.notebook.display.text_output import print_message
from accelerate_nb.notebook.host import NotebookHost, host
from accelerate_nb.reports.text_format import counted
from accelerate_nb.transport.session_tasks import RunCell
from accelerate_nb.worker.session.task_loop import DetachedCell

NAME = "accelerate"
_HELP = frozenset({"-h", "--help", "help"})
# The flags of the cell, then those of the session, stand in the braces.
_CELL_HELP = """\
Run the cell on every rank of a session, which keeps its variables between cells.

    %%accelerate -n 2 --mixed-precision bf16
    x = torch.ones(3, device=device) * rank
    accelerator.reduce(x)

The first such cell starts the session. A cell without flags uses the session as it is; a setting with another
value restarts it, with a message. There are `accelerator`, `rank`, `world_size` and `device`.
With --detach the cell is a run of its own, which outlives the notebook: it knows the notebook's variables that it
names, and none of the session's. `accelerate_nb.attach()` finds it again.
`%accelerate?` lists the commands for the session.

Of the cell:
{}

Of the session:
{}"""


def register(shell: Any) -> None:
    """Make `%%accelerate` and `%accelerate` known to a shell, with their completion; a session that it has stays."""
    former = shell.find_cell_magic(NAME)
    kept = former.kept if isinstance(former, AccelerateCellMagic) else NotebookSession()
    where = lambda: host(os.environ)  # noqa: E731 - looked up when a cell runs
    shell.register_magic_function(AccelerateCellMagic(shell, kept, where), "cell", NAME)
    shell.register_magic_function(AccelerateLineMagic(SessionCommands(shell, kept, where)), "line", NAME)
    completion.register(shell, NAME, kept.names)


def unregister(shell: Any) -> None:
    """End the session, and forget the magics."""
    magic = shell.find_cell_magic(NAME)
    if not isinstance(magic, AccelerateCellMagic):
        return
    magic.kept.stop()
    for magic_type in ("cell", "line"):
        shell.magics_manager.magics[magic_type].pop(NAME, None)
    completion.unregister(shell)


@dataclass(frozen=True)
class AccelerateCellMagic:
    """`%%accelerate`: run a cell on every rank."""

    shell: Any
    kept: NotebookSession = field(repr=False)
    host: Callable[[], NotebookHost] = field(repr=False)

    def __call__(self, line: str, cell: str) -> Run | None:
        """Run a cell; with `--background` or `--detach`, what runs it."""
        __tracebackhide__ = True
        if _HELP & set(line.split()):
            print_message(self.getdoc())
            return None
        with short_tracebacks(self.shell):
            return self._run(line, CellCode(self.shell, cell))

    def getdoc(self) -> str:
        """The text of `%%accelerate?`."""
        of_cell = [cell_flag for cell_flag in cell_flags() if cell_flag.section == section_name(CellOptions)]
        of_session = [cell_flag for cell_flag in cell_flags() if cell_flag not in of_cell]
        return _CELL_HELP.format(help_of(of_cell), help_of(of_session))

    def _run(self, line: str, code: CellCode) -> Run | None:
        __tracebackhide__ = True
        options, given = read_cell_line(line)
        code.check()
        if options.detach:
            return self._detached(options, given, code)
        self._wait_for_background(options)
        session = self.kept.ready(given, restart=options.restart)
        ranks = ranks_of(options.ranks, session.size)
        if options.local:
            code.run_locally()
        launching = session.config.launching
        # text, or on request the live panel
        panel = front_end(launching, os.environ) if launching.panel == "widget" else None
        shown_ranks = session.ranks if ranks is None else ranks
        output = CellOutput(
            self.host().screen, shown_ranks, launching.log_line_prefix_template, options.displays, panel
        )
        run = session.run(
            code.text,
            ranks=ranks,
            name=f"Cell In[{code.number}]",
            number=code.number,
            first_line=FIRST_LINE,
            timeout=options.timeout,
            front_end=output,
            outlives_wait=options.background,
        )
        if options.background:
            self.kept.background, self.kept.background_output = run, output
            run.follow()
            return run
        try:
            run.wait()
        except (AccelerateNbError, KeyboardInterrupt) as error:
            if error is run.error:
                self._add_what_follows(error, session, in_panel=output.shows_failure)
            raise
        return None

    def _detached(self, options: CellOptions, given: Mapping[str, Any], code: CellCode) -> Run:
        """The run of a cell that outlives the notebook, in processes of its own."""
        __tracebackhide__ = True
        refused = [name for name in ("ranks", "restart", "background", "local") if getattr(options, name)]
        if refused:
            raise ConfigurationError(
                f"--{refused[0]} was given with --detach, and a detached cell has processes of its own, on all of whose ranks it "
                "runs at once beside the notebook. Leave one of them out."
            )
        config = resolved({**self.kept.picked(), **given, "timeout": options.timeout}, None)
        name = f"Cell In[{code.number}]"
        text = "\n" * (FIRST_LINE - 1) + code.text
        cell = DetachedCell(RunCell(text, code.filename(), code.number), code.values(), name)
        display = front_end(config.launching, os.environ)
        run = Run(launch_detached(cell, (), config), display).start()
        run.follow()
        return run

    def _add_what_follows(self, error: BaseException, session: Session, *, in_panel: bool) -> None:
        """Add to a cell's error what has become of the session."""
        if session.alive:
            follows = f"The session goes on, and keeps its variables ({counted(session.size, 'rank')})."
        else:
            follows = (
                "The session has ended with it. The next %%accelerate cell starts a new one, without its variables."
            )
        if isinstance(error, WorkerError):
            object.__setattr__(error, "message", f"{error}\n\n{follows}")
            if in_panel:
                mark_in_panel(error, follows)
        elif isinstance(error, KeyboardInterrupt):
            text = f"the cell was interrupted on every rank. {follows}"
            shown_as(error, [titled(self.shell, "KeyboardInterrupt", text)])

    def _wait_for_background(self, options: CellOptions) -> None:
        """Wait for the background cell: one cell runs at a time, as in the notebook."""
        running = self.kept.background
        if running is not None and not running.done:
            if options.background:
                raise ConfigurationError(
                    f"--background was given, and {running.name} runs in the background already. Wait for it (%accelerate wait) "
                    "or interrupt it (%accelerate interrupt); without --background this cell waits by itself."
                )
            print_message(f"This cell waits for {running.name}, which runs in the background.")
            running.wait_until_over(None)
        if self.kept.background_output is not None:
            # its last lines come before those of this cell
            self.kept.background_output.closed()


@dataclass(frozen=True)
class AccelerateLineMagic:
    """`%accelerate`: inspect a session, send values to it or fetch them."""

    commands: SessionCommands = field(repr=False)

    # braces and dollar signs of a call are the call's own; IPython's `no_var_expand` sets the same
    _ipython_magic_no_var_expand = True

    def __call__(self, line: str) -> Any:
        """Run the command of the line."""
        __tracebackhide__ = True
        if _HELP & {line.strip()}:
            print_message(self.getdoc())
            return None
        with short_tracebacks(self.commands.shell):
            return self.commands.run(line)

    def getdoc(self) -> str:
        """The text of `%accelerate?`."""
        lines = ["Manage the session in which `%%accelerate` cells run.", ""]
        for line_command in line_commands():
            lines += [f"  %accelerate {line_command.word} {line_command.usage}".rstrip(), f"      {line_command.help}"]
            if line_command.flags and line_command.usage != "[flags]":
                lines += [f"    {line}" for line in help_of(line_command.flags).splitlines()]
        return "\n".join(
            [*lines, "", "`%accelerate` alone is `%accelerate status`; `%%accelerate?` lists the settings."]
        )


@contextmanager
def short_tracebacks(shell: Any) -> Iterator[None]:
    """Show errors of this package by their message alone: the frames above a magic don't help."""
    __tracebackhide__ = True
    try:
        yield
    except AccelerateNbError as error:
        if "_render_traceback_" not in vars(error):
            shown_as(error, [titled(shell, type(error).__name__, str(error))])
        raise
