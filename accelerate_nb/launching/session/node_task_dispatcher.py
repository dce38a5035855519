"""The tasks of a session on one of several nodes, each of which has its own: what fails on one ends what waits for it on the others."""

from __future__ import annotations

from collections.abc import Callable

from accelerate_nb.config.run_config import RunConfig
from accelerate_nb.errors import HangError
from accelerate_nb.events.model import Failure
from accelerate_nb.launching.launched_run import LaunchedRun
from accelerate_nb.launching.rendezvous.launched_nodes import LaunchedNodes
from accelerate_nb.launching.session.cell_run import CellHost, CellRun
from accelerate_nb.launching.session.task_dispatcher import SETTLE, PendingCell, TaskDispatcher, read_reply
from accelerate_nb.reports.failure_summary import failure_line
from accelerate_nb.transport.messages import (
    BeginTask,
    BreakGroups,
    RebuildGroups,
)


class NodeTaskDispatcher(TaskDispatcher):
    """
    Sends tasks to the ranks of this node.

    A cell that has failed is reported to node 0, which has all nodes rebuild their process groups at once, as one new generation. A cell
    of an older generation is ended on each of them, and one that has failed is done when its node knows of the new one: the tasks after
    it find groups that work.
    """

    def __init__(
        self,
        home: CellHost,
        run: LaunchedRun,
        config: RunConfig,
        on_stuck: Callable[[HangError], None],
        nodes: LaunchedNodes,
    ) -> None:
        super().__init__(home, run, config, on_stuck, nodes.ranks_here)
        self._nodes = nodes
        self._rebuilt = 0
        self._is_closing = False

    def interrupt(self, cell: CellRun) -> None:
        """Interrupt a cell on every rank that has not ended it; ranks elsewhere may wait for them."""
        with self.lock:
            pending_cell = self._open.get(cell.number)
            if pending_cell is not None:
                what = "was interrupted"
                if pending_cell.stacks is not None:
                    late = f"had not ended after timeout={pending_cell.timeout or 0:g} s"
                    what = late if pending_cell.timeout else "waited for ranks that had returned"
                self._report(pending_cell, f"{cell.name} of {self._nodes.name} {what}")
            super().interrupt(cell)

    def rebuild(self, message: RebuildGroups) -> None:
        """Rebuild the process groups of this node's ranks after what they do now, which is ended."""
        with self.lock:
            if self._is_closing:
                return
            self._rebuilt = message.generation
            for pending_cell in list(self._open.values()):
                is_own = message.node == self._nodes.name and (pending_cell.failed or pending_cell.interrupted)
                self._end_cell(pending_cell, "" if is_own else message.reason)
            number = next(self._numbers)
            for rank in self.ranks:
                self._send_nothing_but(BeginTask(number, f"{message.generation}", self._others(rank)), rank)

    def close(self, reason: str) -> None:
        """End the cells that run, since the sessions of all nodes end, for a reason."""
        with self.lock:
            self._is_closing = True
            for pending_cell in list(self._open.values()):
                self._end_cell(pending_cell, reason, after=0.0)

    def _end_cell(self, pending_cell: PendingCell, cause: str, after: float = SETTLE) -> None:
        """End a cell, which may still come to its own end for so many seconds."""
        if not pending_cell.uses_groups and not self._is_closing:
            return
        pending_cell.cause = pending_cell.cause or cause
        if not pending_cell.waiting:
            self._finish(pending_cell)
        elif not (pending_cell.failed or pending_cell.interrupted):
            pending_cell.after(after, self._settle)

    # ------------------------------------------------------------------------------------- what differs on several nodes

    @property
    def _generation(self) -> int:
        return self._rebuilt

    @property
    def _where(self) -> str:
        return " on this machine"

    def _renewal(self, pending_cell: PendingCell) -> str | None:
        """None: groups are rebuilt as soon as they are broken, since other nodes may run no cell for long."""
        return None

    def _take_rebuilt(self, file: int, rank: int) -> None:
        failure = read_reply(file, rank).failure
        if failure is not None and not self._is_closing:
            error = HangError()
            error.message = (
                f"The process groups of all machines were to be rebuilt after a failure, and {self._text_of(failure)}. The session was "
                "ended. Start another session."
            )
            self._on_stuck(error)

    def _on_failure(self, pending_cell: PendingCell, failure: Failure) -> None:
        self._report(pending_cell, self._text_of(failure))

    def _finish(self, pending_cell: PendingCell) -> None:
        pending_cell.close()
        has_ended_badly = pending_cell.failed or pending_cell.interrupted
        is_known = pending_cell.generation < self._generation or self._is_closing
        if pending_cell.uses_groups and has_ended_badly and not is_known:
            # `rebuild` comes back to it
            return
        super()._finish(pending_cell)

    def _report(self, pending_cell: PendingCell, reason: str) -> None:
        if pending_cell.uses_groups and pending_cell.generation == self._generation:
            self._nodes.report(BreakGroups(self._generation, reason))

    def _text_of(self, failure: Failure) -> str:
        name = f"rank {failure.rank}"
        return failure_line(failure).replace(name, f"{name} of {self._nodes.name}", 1)
