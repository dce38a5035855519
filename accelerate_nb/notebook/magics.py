"""`%%accelerate` and `%accelerate`: cells and lines that reach every rank of a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from accelerate_nb.config.cells import CellWish, cell_flags, line_commands, ranks_of, read_cell_line
from accelerate_nb.errors import AccelerateNbError, ConfigurationError, WorkerError
from accelerate_nb.launching.cell_run import CellRun
from accelerate_nb.launching.session import Session
from accelerate_nb.notebook.cells import completing
from accelerate_nb.notebook.cells.background import BackgroundCell
from accelerate_nb.notebook.cells.code import FIRST_LINE, CellCode, shown_as, titled
from accelerate_nb.notebook.cells.commands import Commands
from accelerate_nb.notebook.cells.flags import help_of
from accelerate_nb.notebook.cells.kept_session import KeptSession
from accelerate_nb.notebook.cells.output import CellOutput, results_of
from accelerate_nb.notebook.cells.panelled import CellWatch, PanelOutput
from accelerate_nb.notebook.cells.saying import say
from accelerate_nb.notebook.choosing import front_end
from accelerate_nb.notebook.host import Host, host

NAME = "accelerate"
_HELP = frozenset({"-h", "--help", "help"})


def register(shell: Any) -> None:
    """Make `%%accelerate` and `%accelerate` known to a shell, with their completion; a session that it has stays."""
    former = shell.find_cell_magic(NAME)
    kept = former.kept if isinstance(former, CellMagic) else KeptSession()
    where = _host_here
    magics = (("cell", CellMagic(shell, kept, where)), ("line", LineMagic(Commands(shell, kept, where))))
    for kind, magic in magics:
        shell.register_magic_function(magic, kind, NAME)
    completing.register(shell, NAME, kept)


def unregister(shell: Any) -> None:
    """End the session, and forget the magics."""
    magic = shell.find_cell_magic(NAME)
    if not isinstance(magic, CellMagic):
        return
    magic.kept.stop()
    for kind in ("cell", "line"):
        shell.magics_manager.magics[kind].pop(NAME, None)
    completing.unregister(shell)


def _host_here() -> Host:
    return host(os.environ)


@dataclass(frozen=True)
class CellMagic:
    """`%%accelerate`: run a cell on every rank."""

    shell: Any
    kept: KeptSession = field(repr=False)
    host: Callable[[], Host] = field(repr=False)

    def __call__(self, line: str, cell: str) -> BackgroundCell | None:
        """Run a cell; with `--background`, what runs it."""
        __tracebackhide__ = True
        if _HELP & set(line.split()):
            say(self.getdoc())
            return None
        with told_shortly(self.shell):
            return self._run(line, CellCode(self.shell, cell))

    def getdoc(self) -> str:
        """What `%%accelerate?` shows."""
        return cell_help()

    def _run(self, line: str, code: CellCode) -> BackgroundCell | None:
        __tracebackhide__ = True
        wish, said = read_cell_line(line)
        code.check()
        self._wait_for_background(wish)
        session = self.kept.ready(said, fresh=wish.fresh)
        ranks = ranks_of(wish.ranks, session.size)
        if wish.also_here:
            code.run_here()
        run = session.run(
            code.text,
            ranks=ranks,
            name=f"Cell In[{code.number}]",
            number=code.number,
            first_line=FIRST_LINE,
            timeout=wish.timeout,
        )
        if wish.background:
            return self._in_background(session, run, wish)
        self._here(session, run, wish)
        return None

    def _here(self, session: Session, run: CellRun, wish: CellWish) -> None:
        __tracebackhide__ = True
        text = CellOutput.of(session, run, self.host().screen(), self.kept.cursor, wish.displays)
        output = self._shown(session, run, text, background=False)
        try:
            run.wait(output.refresh, throw=False)
        finally:
            output.closed(results_of(run.ends))
            self.kept.cursor = text.cursor
        if run.error is not None:
            raise self._with_what_follows(run.error, session)

    def _with_what_follows(self, error: BaseException, session: Session) -> BaseException:
        """A cell's error, with what has become of the session."""
        if session.alive:
            follows = f"The session goes on, and keeps its variables ({session.size} ranks)."
        else:
            follows = (
                "The session has ended with it. The next %%accelerate cell starts a new one, without its variables."
            )
        if isinstance(error, WorkerError):
            object.__setattr__(error, "message", f"{error}\n\n{follows}")
            return error
        if isinstance(error, KeyboardInterrupt):
            return shown_as(
                error, [titled(self.shell, "KeyboardInterrupt", f"the cell was interrupted on every rank. {follows}")]
            )
        return error

    def _in_background(self, session: Session, run: CellRun, wish: CellWish) -> BackgroundCell:
        text = CellOutput.of(session, run, self.host().screen(), self.kept.cursor, wish.displays)
        output = self._shown(session, run, text, background=True)

        def ended() -> None:
            self.kept.cursor = text.cursor

        self.kept.background = BackgroundCell(run, output, self.host().screen(), ended).follow()
        return self.kept.background

    def _shown(self, session: Session, run: CellRun, text: CellOutput, *, background: bool) -> CellOutput | PanelOutput:
        """What shows a cell: text, or where that was asked for the live panel."""
        if session.config.launching.panel != "widget":
            return text
        card = front_end(session.config.launching, os.environ)
        return PanelOutput(CellWatch(run), card, text.values, background=background)

    def _wait_for_background(self, wish: CellWish) -> None:
        """One cell at a time: the next waits, as it would behind any other cell of the notebook."""
        running = self.kept.background
        if running is None or running.done:
            return
        if wish.background:
            raise ConfigurationError(
                f"--background was given, and {running.name} runs in the background already. Wait for it (%accelerate wait) "
                "or interrupt it (%accelerate interrupt); without --background this cell waits by itself."
            )
        say(f"This cell waits for {running.name}, which runs in the background.")
        running.finish()


@dataclass(frozen=True)
class LineMagic:
    """`%accelerate`: ask a session something, send it values or fetch them."""

    commands: Commands = field(repr=False)

    # braces and dollar signs of a call are the call's own; IPython's `no_var_expand` sets the same
    _ipython_magic_no_var_expand = True

    def __call__(self, line: str) -> Any:
        """Do what the line says."""
        __tracebackhide__ = True
        if _HELP & {line.strip()}:
            say(self.getdoc())
            return None
        with told_shortly(self.commands.shell):
            return self.commands.run(line)

    def getdoc(self) -> str:
        """What `%accelerate?` shows."""
        return line_help()


@contextmanager
def told_shortly(shell: Any) -> Iterator[None]:
    """Errors of this package are shown by their message: the lines that led to a magic tell nothing."""
    __tracebackhide__ = True
    try:
        yield
    except AccelerateNbError as error:
        if "_render_traceback_" not in vars(error):
            shown_as(error, [titled(shell, type(error).__name__, str(error))])
        raise


# ---------------------------------------------------------------------------------------------------------------- help


def cell_help() -> str:
    """How `%%accelerate` is used, with every flag."""
    own = [one for one in cell_flags() if one.section == CellWish.__name__.lower()]
    rest = [one for one in cell_flags() if one not in own]
    return "\n".join(
        [
            "Run the cell on every rank of a session, which keeps its variables between cells.",
            "",
            "    %%accelerate -n 2 --mixed-precision bf16",
            "    x = torch.ones(3, device=device) * rank",
            "    accelerator.reduce(x)",
            "",
            "The first such cell starts the session. A cell without flags uses the session as it is; a setting with another",
            "value starts it anew, and says so. There are `accelerator`, `rank`, `world_size` and `device`.",
            "`%accelerate?` tells how to look after the session.",
            "",
            "Of the cell:",
            help_of(own),
            "",
            "Of the session:",
            help_of(rest),
        ]
    )


def line_help() -> str:
    """How `%accelerate` is used, with every command."""
    lines = ["Look after the session in which `%%accelerate` cells run.", ""]
    for one in line_commands():
        lines += [f"  %accelerate {one.word} {one.usage}".rstrip(), f"      {one.help}"]
        if one.flags and one.usage != "[flags]":
            lines += [f"    {line}" for line in help_of(one.flags).splitlines()]
    return "\n".join([*lines, "", "`%accelerate` alone is `%accelerate status`; `%%accelerate?` lists the settings."])
