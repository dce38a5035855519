"""IPython in a worker: cells with magics, `await`, results and figures, and no terminal."""

import os
import sys
import warnings
from types import ModuleType
from typing import Any

from IPython import get_ipython
from IPython.core import interactiveshell
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from traitlets import Type
from traitlets.config import Config

from accelerate_nb.sources.cells import kept_numbers, name_in_warnings
from accelerate_nb.transport.session_tasks import RunCell
from accelerate_nb.worker.stdio import as_plain, show

_FIGURES = "module://matplotlib_inline.backend_inline"


class ResultHook(DisplayHook):
    """Keeps the last expression's MIME bundle for the kernel; one that another follows is shown at once."""

    bundle: tuple[dict[str, Any], dict[str, Any]] | None = None

    def _write_nothing(self) -> None:
        """The notebook writes its own prompt, and what is not written is not flushed."""

    write_output_prompt = finish_displayhook = _write_nothing

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        if self.bundle is not None:
            show(*self.bundle)
        self.bundle = (format_dict, md_dict or {})


class RankDisplayPublisher(DisplayPublisher):
    """Sends what is displayed to the notebook, under this rank."""

    def publish(
        self, data: Any, metadata: Any = None, *_: Any, transient: Any = None, update: bool = False, **__: Any
    ) -> None:
        """Show a MIME bundle, or put it in the place of the one of the same display id."""
        show(data, metadata or {}, str((transient or {}).get("display_id") or ""), update=update)

    def clear_output(self, wait: bool = False) -> None:
        """Lines of several ranks stand together; none of them are taken away."""


class WorkerShell(InteractiveShell):
    """An `InteractiveShell` for cells that a kernel sends: it prompts for nothing, writes no history and shows no tracebacks."""

    displayhook_class = Type(ResultHook)
    display_pub_class = Type(RankDisplayPublisher)

    def init_profile_dir(self, profile_dir: Any) -> None:
        """Several workers begin at once, and none of them needs a folder; what magics remember, they remember here."""
        self.profile_dir = ProfileDir()
        self._db: Any = {}

    def transform_cell(self, raw_cell: str) -> str:
        """Plain Python; lines that stand empty above the code stay, so that the others keep their numbers."""
        above = raw_cell[: len(raw_cell) - len(raw_cell.lstrip())].count("\n")
        python: str = super().transform_cell(raw_cell)  # type: ignore[no-untyped-call]  # IPython's own
        return "\n" * above + python

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        """The kernel shows failures. A worker has no keyboard and no windows, has opened nothing, and no `exit` ends its session."""

    showtraceback = showsyntaxerror = showindentationerror = show_usage_error = _do_nothing
    init_pdb = enable_gui = ask_exit = atexit_operations = _do_nothing

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> dict[str, Any]:
        # IPython's own reads and colours the sources of every frame, for a history that nobody reads: seconds, in torch
        return {"ename": type(exception).__name__, "evalue": "", "traceback": []}

    def run(self, cell: RunCell) -> tuple[dict[str, Any] | None, dict[str, Any], BaseException | None]:
        """The MIME bundle of a cell's last expression, what goes with it, and what the cell raised."""
        hook, compiler = self.displayhook, vars(self.compile)
        assert isinstance(hook, ResultHook)
        hook.bundle = None
        self.execution_count = cell.number
        # a cell's code has the name that the kernel knows it by
        compiler["get_code_name"] = lambda *_: cell.filename
        kept_numbers(self)[cell.filename] = cell.number  # as IPython 8 does by itself
        run: Any = self.run_cell
        try:
            outcome = run(cell.source, store_history=True)
        finally:
            del compiler["get_code_name"]
        # nothing of the cell has run: the frames are IPython's own
        unread = outcome.error_before_exec
        error = outcome.error_in_exec if unread is None else unread.with_traceback(None)
        if (kept := hook.bundle) is None:
            return None, {}, error
        return as_plain(kept[0]), kept[1], error


def current_shell() -> InteractiveShell:
    """The process's shell; where there is none yet, one whose cells run in `__main__`."""
    return get_ipython() or new_shell(sys.modules["__main__"])


def new_shell(main: ModuleType) -> WorkerShell:
    """The process's shell, whose cells run in the module `main`."""
    os.environ.setdefault("MPLBACKEND", _FIGURES)
    # a worker that was forked by a notebook has inherited the notebook's
    if InteractiveShell.initialized():
        type(InteractiveShell.instance()).clear_instance()
    # older IPythons open a folder for what magics remember as soon as they begin
    if hasattr(interactiveshell, "PickleShareDB"):
        interactiveshell.PickleShareDB = lambda _: {}
    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    shell: WorkerShell = WorkerShell.instance(user_module=main, user_ns=vars(main), config=config)
    shell.autoawait = True
    name_in_warnings()
    # an exit ends the cell, and that is that
    warnings.filterwarnings("ignore", message="To exit: use 'exit'")
    # IPython knows here what to do with display ids, and formatters that a cell registers
    for name in ("IPython.core.display_functions", "IPython.display"):
        if name in sys.modules:
            sys.modules[name].display = interactiveshell.display  # type: ignore[attr-defined]
    return shell
