"""What widgets add to tables of runs: rows that open their runs, and charts of runs that are compared."""

from __future__ import annotations

import contextvars
import threading
from dataclasses import replace
from typing import Any
from uuid import uuid4

import anywidget
import traitlets

from accelerate_nb.errors import AccelerateNbError
from accelerate_nb.events.run_reader import kept_run
from accelerate_nb.launching.detached.control import RemoteConductor
from accelerate_nb.launching.run import Run
from accelerate_nb.notebook.display.busy_kernel_comm import kernel_comm
from accelerate_nb.notebook.display.message_feed import Message
from accelerate_nb.notebook.display.output_area import MimeBundle
from accelerate_nb.notebook.display.run_display import RunDisplay, frontend_state
from accelerate_nb.notebook.page import bundle as joining
from accelerate_nb.reports.run_table import RunTable


class RunListWidget(anywidget.AnyWidget):
    """A widget without a view of its own: the page has it turn the rows of the element `table` into buttons."""

    _esm = joining.module("run_list")
    table: Any = traitlets.Unicode("").tag(sync=True)


class RunBrowser:
    """Opens runs of a table in the page that shows it: the panel of each, from the run's folder and, while it goes on, its run host."""

    # the page puts a run under its row, where it gives access to its notebook: in JupyterLab and Notebook
    is_delivered = True

    def __init__(self, runs: RunTable, host: str) -> None:
        self._runs, self._host = runs, host
        self.element_id = f"accelerate-nb-runs-{uuid4().hex[:12]}"
        self._widget = RunListWidget(table=self.element_id)
        self._comm = str(self._widget.model_id)
        self._shown: _OutputBelow | None = None
        self._widget.on_msg(lambda _widget, content, _buffers: self._receive(content))
        # a person may look at former runs while a cell trains
        kernel_comm().join(self._comm, self._receive)

    def close(self) -> None:
        """Open no more runs."""
        kernel_comm().leave(self._comm)
        self._widget.close()

    def update(self, output: _OutputBelow, bundle: MimeBundle | None) -> None:
        """Show a run under its row, or none, unless another one was opened meanwhile."""
        if output is self._shown:
            content = {} if bundle is None else {"data": dict(bundle.data), "metadata": dict(bundle.metadata)}
            # the table above and below it is sent once: they stay as they are
            parts, output.parts = output.parts, None
            self._widget.send({"show": output.number, "parts": parts, **content})

    def _receive(self, content: Message) -> None:
        """Open a run in a thread of its own: its folder may hold a day of metrics."""
        number = content.get("open")
        if number is None or isinstance(number, int):
            context = contextvars.copy_context()
            threading.Thread(
                target=context.run, args=(self._open, number), name="accelerate_nb run", daemon=True
            ).start()

    def _open(self, number: int | None) -> None:
        frontend_state().keep(self)
        self._shown = output = _OutputBelow(self, number, self._runs.html_parts(self.element_id, number))
        if number is None:
            self.update(output, None)
            return
        try:
            # its name may come from the other runs
            found = kept_run(self._runs[number].folder)
            if found is None:
                output.update(MimeBundle({"text/plain": "The folder of this run is gone."}))
            else:
                display = RunDisplay(self._host, live=True, new_output=output.shown)
                Run(RemoteConductor(replace(found, name=self._runs[number].name)), display).start().follow()
        except (AccelerateNbError, OSError) as error:
            output.update(MimeBundle({"text/plain": f"{type(error).__name__}: {error}"}))


class _OutputBelow:
    """The output under a row, for its run; `parts` are the table above and below that, as HTML."""

    cell = ""

    def __init__(self, browser: RunBrowser, number: int | None, parts: tuple[str, str]) -> None:
        self.number = number
        self._browser = browser
        self.parts: tuple[str, str] | None = parts

    def shown(self, bundle: MimeBundle) -> _OutputBelow:
        """Show this; returns the output."""
        self.update(bundle)
        return self

    def update(self, bundle: MimeBundle) -> None:
        self._browser.update(self, bundle)


class ComparisonWidget(anywidget.AnyWidget):
    """A widget without a view of its own: the page has it draw the panel's charts of compared runs in the place of the element `charts`."""

    is_delivered = True

    _esm = joining.module("comparison")
    _css = joining.style()
    charts: Any = traitlets.Unicode("").tag(sync=True)
    message: Any = traitlets.Dict().tag(sync=True)
