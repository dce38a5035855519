"""Real notebook kernels for tests: cells run in one as they would in a notebook."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from tempfile import gettempdir
from textwrap import dedent
from typing import Any

import nbformat
import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, output_from_msg

ROOT = Path(__file__).resolve().parents[2]
# How long a cell may take where a test says nothing else.
TIMEOUT = 60.0
# Every process that a kernel starts inherits this variable, however its parents end.
_MARK = "TESTED_KERNEL"
# A person's notebook has none of these, with which other things happen to output and threads.
OF_A_SHELL = {"PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "OMP_NUM_THREADS"}
_OUTPUTS = {"stream", "display_data", "execute_result", "error"}


@dataclass(frozen=True)
class Error:
    """What a cell raised: its class's name, its text, and what the notebook shows of it (without colours)."""

    name: str
    text: str
    traceback: str


@dataclass
class Cell:
    """A cell that runs in a kernel, and what it has put out so far; `seconds` are those that it took."""

    kernel: Kernel
    message: str
    began: float
    number: int = 0
    done: bool = False
    seconds: float = 0.0
    outputs: list[NotebookNode] = field(default_factory=list)
    _shown: dict[str, list[NotebookNode]] = field(default_factory=dict)

    def wait(self, timeout: float = TIMEOUT) -> Cell:
        """Wait until the cell has run, whatever came of it."""
        self.until(lambda: self.done, timeout)
        return self

    def until(self, happened: Callable[[], bool], timeout: float = TIMEOUT) -> None:
        """Wait until something has happened in the cell; the cell says what it put out if that takes too long."""
        deadline = time.monotonic() + timeout
        while not happened():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing of it after {timeout:g} s; the cell has put out:\n{self.text}")
            if self.done:
                raise AssertionError(f"the cell has run, and it did not happen; it put out:\n{self.text}")
            self.kernel.receive(0.2)

    def until_output(self, text: str, timeout: float = TIMEOUT) -> None:
        """Wait until a text is among what the cell wrote."""
        self.until(lambda: text in self.stdout + self.stderr, timeout)

    def result(self) -> Cell:
        """The same cell, which must not have raised."""
        assert self.error is None, f"{self.error.traceback}\n{self.text}"
        return self

    @property
    def stdout(self) -> str:
        """What it wrote on standard output."""
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        """What it wrote on standard error."""
        return self._stream("stderr")

    @property
    def displays(self) -> list[dict[str, Any]]:
        """The MIME bundles that it shows, as they are after all updates."""
        return [
            dict(output.data) for output in self.outputs if output.output_type in {"display_data", "execute_result"}
        ]

    @property
    def error(self) -> Error | None:
        """What it raised."""
        raised = [output for output in self.outputs if output.output_type == "error"]
        if not raised:
            return None
        (output,) = raised
        return Error(output.ename, output.evalue, without_colours("\n".join(output.traceback)))

    @property
    def failure(self) -> Error:
        """What it raised, since it must have."""
        assert self.error is not None, self.text
        return self.error

    @property
    def text(self) -> str:
        """All that a person reads in it."""
        shown = [display.get("text/plain", "") for display in self.displays]
        return "\n".join([self.stdout, self.stderr, *shown, self.error.traceback if self.error else ""])

    def saved_size(self) -> int:
        """How many bytes the cell takes in a saved notebook."""
        return len(nbformat.writes(new_notebook(cells=[new_code_cell(outputs=self.outputs)])).encode())

    def take(self, message: dict[str, Any]) -> None:
        """One message of the kernel about this cell, as a front end keeps it."""
        message_type, content = message["msg_type"], message["content"]
        if message_type == "status" and content["execution_state"] == "idle":
            self.done, self.seconds = True, time.monotonic() - self.began
        elif message_type == "execute_input":
            self.number = content["execution_count"]
        elif message_type == "update_display_data":
            for shown in self._shown.get(content["transient"]["display_id"], []):
                shown.data = content["data"]
        elif message_type in _OUTPUTS:
            self._keep(output_from_msg(message), content.get("transient", {}).get("display_id"))

    def _keep(self, output: NotebookNode, display_id: str | None) -> None:
        last = self.outputs[-1] if self.outputs else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
            return
        self.outputs.append(output)
        if display_id is not None:
            self._shown.setdefault(display_id, []).append(output)

    def _stream(self, name: str) -> str:
        return "".join(output.text for output in self.outputs if output.output_type == "stream" and output.name == name)


class Kernel:
    """A kernel with a client. Ends with all its processes when its block does."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient, mark: str) -> None:
        self._manager, self._client, self._mark = manager, client, mark
        self._cells: dict[str, Cell] = {}
        # called with every message that the kernel publishes
        self.listeners: list[Callable[[dict[str, Any]], None]] = []

    def start(self, code: str, cell_id: str = "") -> Cell:
        """Begin to run a cell; `cell_id` is what JupyterLab sends with it."""
        began = time.monotonic()
        request = {"code": dedent(code).strip("\n"), "silent": False, "store_history": True, "allow_stdin": True}
        # after a cell that raised, a kernel drops the cells that it has received by then, which "Run All" wants, and no test
        request["stop_on_error"] = False
        message = self.send("execute_request", request, **({"cellId": cell_id} if cell_id else {}))
        self._cells[message] = cell = Cell(self, message, began)
        return cell

    def run(self, code: str, timeout: float = TIMEOUT) -> Cell:
        """Run a cell to its end, whatever comes of it."""
        return self.start(code).wait(timeout)

    def ok(self, code: str, timeout: float = TIMEOUT) -> Cell:
        """Run a cell that must not raise."""
        return self.run(code, timeout).result()

    def value(self, expression: str, timeout: float = TIMEOUT) -> Any:
        """What an expression of plain values is in the kernel."""
        expressions = {"value": f"__import__('json').dumps({expression})"}
        message = self._client.execute("", silent=True, user_expressions=expressions)
        answer = self.reply(message, timeout)["user_expressions"]["value"]
        assert answer["status"] == "ok", f"{expression}: {answer}"
        # the text is the repr of a str of JSON
        return json.loads(ast.literal_eval(answer["data"]["text/plain"]))

    def receive(self, timeout: float) -> None:
        """Take the next message that the kernel sends, if one comes in time."""
        try:
            message = self._client.get_iopub_msg(timeout=timeout)
        except Empty:
            assert self._manager.is_alive(), "the kernel has died"
            return
        for listen in self.listeners:
            listen(message)
        cell = self._cells.get(message["parent_header"].get("msg_id", ""))
        if message["msg_type"] == "update_display_data":
            # of whatever cell: a page finds what is shown by its name
            for item in self._cells.values():
                item.take(message)
        elif cell is not None:
            cell.take(message)

    def interrupt(self) -> None:
        """What the notebook's stop button does."""
        self._manager.interrupt_kernel()

    def send(self, message_type: str, content: dict[str, Any], **metadata: Any) -> str:
        """Send a message on the channel of cells, as a page does; gives its name."""
        message = self._client.session.msg(message_type, content, metadata=metadata)
        self._client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def reply(self, message: str, timeout: float, channel: str = "shell") -> dict[str, Any]:
        """What the kernel replies to such a message; `Empty` is raised after `timeout`."""
        deadline = time.monotonic() + timeout
        receive = getattr(self._client, f"get_{channel}_msg")
        while True:
            reply = receive(timeout=max(0.01, deadline - time.monotonic()))
            if reply["parent_header"].get("msg_id") == message:
                return dict(reply["content"])

    def answers(self, timeout: float) -> float:
        """The seconds until the kernel answers a request beside the running cell; `Empty` is raised after `timeout`."""
        began = time.monotonic()
        message = self._client.session.msg("kernel_info_request")
        self._client.control_channel.send(message)
        self.reply(message["header"]["msg_id"], timeout, "control")
        return time.monotonic() - began

    @property
    def beats(self) -> bool:
        """Whether the kernel's heart beats."""
        return bool(self._client.hb_channel.is_beating())

    @property
    def pid(self) -> int:
        """The kernel's process number."""
        return int(self._manager.provisioner.pid)

    @property
    def alive(self) -> bool:
        """Whether the kernel's process is there."""
        return bool(self._manager.is_alive())

    def processes(self) -> list[psutil.Process]:
        """Every process that the kernel or one of its children started and that is still there, the kernel left out."""
        return [item for item in _marked(self._mark) if item.pid != self.pid]

    def workers(self) -> list[psutil.Process]:
        """What is there of launches: not the supervisor, what it keeps ready, or the tracker that multiprocessing starts."""
        supervisor_pids = {supervisor.pid for supervisor in self.supervisors()}
        return [
            process
            for process in self.processes()
            if _session(process) not in supervisor_pids
            and not any("multiprocessing.resource_tracker" in word for word in _command(process))
        ]

    def supervisors(self) -> list[psutil.Process]:
        """The kernel's children that fork workers: one at most."""
        children = psutil.Process(self.pid).children()
        return [child for child in children if "accelerate_nb.supervisor.main" in _command(child)]

    def supervisor(self) -> psutil.Process:
        """The kernel's child that forks workers."""
        (found,) = self.supervisors()
        return found

    def shut_down(self) -> None:
        """Ask the kernel to end, as closing a notebook does; comes back when it has."""
        process = psutil.Process(self.pid)
        self._manager.request_shutdown()
        process.wait(10)

    def kill(self) -> None:
        """SIGKILL for the kernel's own process; gives when it has gone."""
        process = psutil.Process(self.pid)
        os.kill(self.pid, signal.SIGKILL)
        process.wait(5)

    def end(self) -> None:
        """End the kernel and everything that it started."""
        self._client.stop_channels()
        with suppress(RuntimeError):
            self._manager.shutdown_kernel(now=True)
        for process in _marked(self._mark):
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def kernel(folder: Path, **environment: str) -> Iterator[Kernel]:
    """A new kernel that works in `folder` and keeps its runs there; `environment` is added to a person's own."""
    mark = uuid.uuid4().hex
    variables = {name: value for name, value in os.environ.items() if name not in OF_A_SHELL}
    variables["CUDA_VISIBLE_DEVICES"] = ""  # a machine without accelerators, whatever this one has
    shown = {"ACCELERATE_NB_PANEL": "text"}  # what a run says is in the cell's text
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**variables, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder), _MARK: mark, **shown, **environment}
    # a port that is chosen before it is bound may be taken by another process meanwhile
    manager = KernelManager(kernel_name="python3", transport="ipc", ip=str(Path(gettempdir(), mark)))
    manager.start_kernel(env=environ, cwd=str(folder))
    client = manager.blocking_client()
    client.start_channels()
    running = Kernel(manager, client, mark)
    try:
        client.wait_for_ready(timeout=TIMEOUT)
        running.ok("from accelerate_nb import launch, notebook_launcher")
        yield running
    finally:
        running.end()


def gone(processes: list[psutil.Process], within: float) -> list[psutil.Process]:
    """Those of the processes that are still there after so many seconds."""
    return psutil.wait_procs(processes, timeout=within)[1]


def without_colours(text: str) -> str:
    """A text as a person reads it."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _session(process: psutil.Process) -> int:
    # a worker leads a session of its own
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0


def _command(process: psutil.Process) -> list[str]:
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        # it has ended
        return []


def _marked(mark: str) -> list[psutil.Process]:
    return [item for item in psutil.process_iter() if _environment(item).get(_MARK) == mark]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        # it has ended, or is somebody else's
        return {}
