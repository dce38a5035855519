"""A kernel that executes a notebook's cells one after another, and is interrupted by this command's signals."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import zmq
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager, NoSuchKernel
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionComplete, CellExecutionError, DeadKernelError
from nbclient.util import ensure_async

from accelerate_nb.errors import LaunchError

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_SKIPPED = "skip-execution"
# Seconds in which a kernel may start; where a machine is busy, or its disk is far away, that takes long.
_START = 180
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_WIDTH = 60
# The location of a frame in IPython's tracebacks, since 8.0.
_LOCATION = re.compile(r"(?:Cell|Input) In ?\[(?P<cell>\d+)\](?:, line |, in <cell line: )(?P<line>\d+)")


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel that a notebook gets: an installed one, by its name, or this very Python's."""

    name: str
    is_current_python: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CellFailure:
    """A cell's error: its number is that of `In [n]`, and lines are counted in the cell from 1."""

    cell: int
    error: str
    locations: tuple[tuple[int, int], ...] = ()  # of the traceback: a cell, and a line of it

    def location(self) -> str:
        """The location, for people: `cell 3, line 1 (raised in cell 2, line 5)`, where a function of cell 2 failed."""
        line = next((line for cell, line in self.locations if cell == self.cell), None)
        where = f"cell {self.cell}" + ("" if line is None else f", line {line}")
        last = self.locations[-1] if self.locations else (self.cell, line)
        return where if last[0] == self.cell else f"{where} (raised in cell {last[0]}, line {last[1]})"


@dataclass(slots=True)
class ExecutionResult:
    """The end of an execution: the signals that came meanwhile, and the error that stopped it."""

    signals: list[int] = field(default_factory=list)
    failure: CellFailure | None = None


def kernel_for(content: Any) -> KernelChoice:
    """The kernel that the notebook names, where that is installed and Python's; else this very Python's."""
    # where the notebook names none, it is written into it
    name = content.metadata.get("kernelspec", {}).get("name")
    spec: Any = None
    with suppress(NoSuchKernel, OSError, ValueError):
        spec = KernelSpecManager().get_kernel_spec(name) if name else None
    if spec is not None and spec.language.lower() in ("python", "ipython") and spec.argv and shutil.which(spec.argv[0]):
        return KernelChoice(name)
    known = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    content.metadata.setdefault("kernelspec", nbformat.from_dict(known))
    note = f"it names the kernel {name!r}, which is not installed here; {sys.executable} executes it."
    return KernelChoice("python3", is_current_python=True, notes=(note,) if name else ())


def executed(
    content: Any, kernel: KernelChoice, folder: Path, environment: Mapping[str, str], progress: CellProgress
) -> ExecutionResult:
    """Execute all cells until one fails or a signal comes; outputs are in the notebook's cells then."""
    # the first signal interrupts the cell, as a notebook's button does, and no other begins; the second kills the
    # kernel
    return asyncio.run(_Execution(content, kernel, progress).conduct(folder, environment))


class _Execution:
    """One notebook in one kernel."""

    def __init__(self, content: Any, kernel: KernelChoice, progress: CellProgress) -> None:
        self._content, self._kernel, self._progress = content, kernel, progress
        self._end = ExecutionResult()
        specs: Any = KernelSpecManager()
        if kernel.is_current_python:
            # it knows one kernel, whatever is installed: the Python that runs here
            specs.get_kernel_spec = lambda name: KernelSpec(name=name, **get_kernel_dict())
        # what cells hold and give would else go in plain text through ports that others of this machine can read
        can_encrypt = "transport_encryption" in AsyncKernelManager.class_trait_names() and zmq.has("curve")
        encryption = {"transport_encryption": "auto"} if can_encrypt else {}
        self._manager: Any = AsyncKernelManager(kernel_name=kernel.name, kernel_spec_manager=specs, **encryption)
        self._client = _Client(content, self._manager, progress, self._begun)
        self._is_executing = False
        self._tasks: set[asyncio.Future[Any]] = set()

    async def conduct(self, folder: Path, environment: Mapping[str, str]) -> ExecutionResult:
        with _on_signals(self._on_signal):
            try:
                await self._client.async_start_new_kernel(cwd=str(folder), env=dict(environment))
                await self._client.async_start_new_kernel_client()
            except (OSError, RuntimeError) as error:
                raise LaunchError(
                    f"The notebook was to be executed by the kernel {self._kernel.name!r}, which does not start: {error}. "
                    f"`jupyter kernelspec list` shows the installed ones."
                ) from None
            client: Any = self._client.kc
            try:
                reply = await self._client.async_wait_for_reply(await ensure_async(client.kernel_info()))
                if reply is not None:
                    self._content.metadata["language_info"] = nbformat.from_dict(reply["content"]["language_info"])
                await self._execute()
                self._client.set_widgets_metadata()
            finally:
                # the kernel ends, and with it whatever it started; it may have ended by itself: "No kernel is running!"
                with suppress(RuntimeError):
                    await self._manager.shutdown_kernel(now=len(self._end.signals) > 1)
                await ensure_async(self._manager.cleanup_resources())
                client.stop_channels()
        return self._end

    async def _execute(self) -> None:
        cells = [
            (at, cell)
            for at, cell in enumerate(self._content.cells)
            if cell.cell_type == "code" and cell.source.strip() and _SKIPPED not in cell.metadata.get("tags", ())
        ]
        for number, (at, cell) in enumerate(cells, start=1):
            if self._end.signals:
                return
            self._progress.began(number, len(cells), cell.source)
            try:
                await self._client.async_execute_cell(cell, at)
            except CellExecutionError as error:
                self._end.failure = self._failure(cell, number, f"{error.ename}: {error.evalue}".rstrip(": "))
                return
            except DeadKernelError:
                why = "was killed" if len(self._end.signals) > 1 else "died"
                died = f"The kernel {why} while it executed this cell."
                message = f"DeadKernelError: {died}"
                error_output = {"ename": "DeadKernelError", "evalue": died, "traceback": [message]}
                cell.outputs.append(nbformat.v4.new_output("error", **error_output))
                self._end.failure = CellFailure(cell.execution_count or number, message)
                return
            finally:
                self._is_executing = False
                self._progress.ended(cell.outputs)

    def _failure(self, cell: Any, number: int, error: str) -> CellFailure:
        last = next((output for output in reversed(cell.outputs) if output.output_type == "error"), None)
        text = _ESCAPES.sub("", "\n".join(last.traceback)) if last is not None else ""
        # IPython counts from the first line that holds something
        code = [item for item in self._content.cells if item.cell_type == "code"]
        above = {
            item.execution_count: next((at for at, line in enumerate(item.source.split("\n")) if line.strip()), 0)
            for item in code
        }
        locations = ((int(found["cell"]), int(found["line"])) for found in _LOCATION.finditer(text))
        in_cells = tuple((cell, line + above.get(cell, 0)) for cell, line in locations)
        return CellFailure(cell.execution_count or number, error, in_cells)

    # ------------------------------------------------------------------------------------------------------- signals

    def _on_signal(self, number: int) -> None:
        self._end.signals.append(number)
        if len(self._end.signals) == 1:
            self._progress.report(
                "Interrupted: the cell is to stop, and no other starts. A second interrupt kills the kernel."
            )
            if self._is_executing:
                self._do(self._manager.interrupt_kernel())
        elif self._manager.has_kernel:
            self._do(self._manager.signal_kernel(signal.SIGKILL))

    def _begun(self) -> None:
        """The kernel executes the cell from now on: a signal before would have gone unheard."""
        self._is_executing = True
        if len(self._end.signals) == 1:
            self._do(self._manager.interrupt_kernel())

    def _do(self, what: Any) -> None:
        task = asyncio.ensure_future(what)
        self._tasks.add(task)  # asyncio itself keeps only weak references
        task.add_done_callback(self._tasks.discard)


@dataclass(eq=False, kw_only=True)
class CellProgress:
    """Prints the running cell to standard error, and passes on what it writes and shows, unless `quiet`."""

    quiet: bool
    _at_line_start: bool = True

    def began(self, number: int, of: int, source: str) -> None:
        """A cell begins: the one with this number, of so many."""
        first = next((line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
        shown = first if len(first) <= _WIDTH else f"{first[: _WIDTH - 3]}..."
        self.report(f"cell {number} of {of}" + (f": {shown}" if shown else ""))

    def wrote(self, stream: str, text: str) -> None:
        """A cell has written something."""
        if not self.quiet and text:
            where = sys.stderr if stream == "stderr" else sys.stdout
            where.write(text if where.isatty() else _ESCAPES.sub("", text))  # colours are for terminals
            where.flush()
            self._at_line_start = text.endswith(("\n", "\r"))

    def ended(self, outputs: list[Any]) -> None:
        """A cell is over: what it shows, as far as that is text, and the traceback of its error."""
        for output in outputs:
            if output["output_type"] == "error":
                self._block("stderr", "\n".join(output["traceback"]))
            elif text := output.get("data", {}).get("text/plain"):
                self._block("stdout", text)

    def report(self, line: str) -> None:
        """A line of this command's own."""
        self._block("stderr", line)

    def _block(self, stream: str, text: str) -> None:
        if text.strip():
            self.wrote(stream, ("" if self._at_line_start else "\n") + text.rstrip("\n") + "\n")


class _Client(NotebookClient):
    """Passes on what cells write as it comes; what a cell gives after its end is put there as well."""

    def __init__(self, content: Any, manager: Any, progress: CellProgress, begun: Any) -> None:
        super().__init__(content, km=manager, timeout=None, startup_timeout=_START, record_timing=False)
        self._progress, self._begun = progress, begun
        self._cells: dict[str, tuple[Any, int]] = {}

    async def _async_poll_output_msg(self, parent_msg_id: str, cell: Any, cell_index: int) -> None:
        # nbclient forgets what a thread of a former cell shows, such as the report of a run in the background
        self._cells[parent_msg_id] = (cell, cell_index)
        client: Any = self.kc
        while True:
            message = await ensure_async(client.iopub_channel.get_msg(timeout=None))
            parent = message["parent_header"].get("msg_id")
            if parent not in self._cells:
                continue
            try:
                self.process_message(message, *self._cells[parent])
            except CellExecutionComplete:
                if parent == parent_msg_id:
                    return

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] == "execute_input":
            self._begun()
        if msg["msg_type"] == "stream":
            self._progress.wrote(msg["content"]["name"], msg["content"]["text"])
        return super().process_message(msg, cell, cell_index)


@contextmanager
def _on_signals(on_signal: Any) -> Iterator[None]:
    """Inside the block signals call this; one that is ignored (`nohup`) stays so."""
    loop = asyncio.get_running_loop()
    before: dict[int, Any] = {}
    for number in (getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)):
        former = signal.getsignal(number)
        # neither in a thread nor on Windows
        with suppress(NotImplementedError, RuntimeError, ValueError):
            if former is not signal.SIG_IGN:
                loop.add_signal_handler(number, on_signal, number)
                before[number] = former
    try:
        yield
    finally:
        for number, former in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, former)
