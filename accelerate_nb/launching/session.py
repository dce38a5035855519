"""A session: a run whose workers stay, and keep their variables from one cell to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate_nb.config.run import RunConfig
from accelerate_nb.events.view import RunView
from accelerate_nb.launching.attempt import Stop
from accelerate_nb.launching.cell_run import CellRun


class Session:
    """
    Workers that stay, and run one cell after the other; each has `accelerator`, `rank`, `world_size` and `device`.

    >>> session = Session.start(resolve({"num_processes": 2}, {}))
    >>> session.run("x = rank + 1\nprint(x)").wait()
    >>> session.pull(["x"], ranks=(0, 1))
    {0: {'x': 1}, 1: {'x': 2}}
    >>> session.close()
    """

    @classmethod
    def start(cls, config: RunConfig, *, refresh: Callable[[], None] = lambda: None) -> Session:
        """
        Start the workers, and come back when they are ready for their first cell; `refresh` is called while one waits.

        `config.launching.timeout` is the time for each cell. Raises `LaunchError` or `WorkerError` where they can't start,
        and `KeyboardInterrupt` after they have been ended because of one.
        """
        raise NotImplementedError

    @property
    def config(self) -> RunConfig:
        """The wish that the session was started with."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """What a person calls it."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """How many ranks there are."""
        raise NotImplementedError

    @property
    def view(self) -> RunView:
        """Everything that has happened so far."""
        raise NotImplementedError

    @property
    def folder(self) -> Path:
        """Where every rank's output, the metrics and the events are kept."""
        raise NotImplementedError

    @property
    def why(self) -> str:
        """How many workers there are, what placed them, and why."""
        raise NotImplementedError

    @property
    def started(self) -> float:
        """When the session began, in seconds since 1970."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """Whether it can be asked for something."""
        raise NotImplementedError

    @property
    def done(self) -> bool:
        """Whether every worker has ended."""
        raise NotImplementedError

    @property
    def error(self) -> BaseException | None:
        """Why it ended, where that was not asked for: a `WorkerError` with a worker's last words, a `LaunchError`."""
        raise NotImplementedError

    @property
    def busy(self) -> tuple[CellRun, ...]:
        """What runs in it now."""
        raise NotImplementedError

    def run(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        name: str | None = None,
        number: int | None = None,
        filename: str | None = None,
        first_line: int = 1,
        timeout: float | None = None,
        silent: bool = False,
    ) -> CellRun:
        """
        Run the text of a cell on all ranks, or on some; comes back at once.

        Tracebacks name its lines as `Cell In[number], line N`; `first_line` is the number of its first one (2 where a line
        with a magic stood above it). `name` is what a person calls it, `filename` under what name its lines are kept;
        without them they are made from the number, without which the session counts. `timeout` in seconds, or that of the
        session's configuration. A `silent` cell leaves no `_`, no `Out[number]` and no result.

        Raises `LaunchError` where the session has ended, or one of these ranks still runs something else, and
        `ConfigurationError` where there is no such rank.
        """
        raise NotImplementedError

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> CellRun:
        """
        Call a function of the notebook in the workers; each rank's `CellEnd` has what it returned as `value`.

        Comes back at once. Raises `PayloadError` where function or arguments can't travel, and what `run` raises.
        """
        raise NotImplementedError

    def push(
        self,
        values: Mapping[str, Any],
        *,
        ranks: Sequence[int] | None = None,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Give variables of the workers these values, one copy for all of them until they write to it.

        Raises `PayloadError`, which names what can't travel, and what `run` raises.
        """
        raise NotImplementedError

    def pull(
        self, names: Sequence[str], *, ranks: Sequence[int] = (0,), refresh: Callable[[], None] = lambda: None
    ) -> dict[int, dict[str, Any]]:
        """
        The values of variables of some ranks, by rank and name; tensors come to the CPU, without their gradients' history.

        Raises a `WorkerError` that is also a `NameError` for a name that is not there (it lists those that are), or a
        `PayloadError` for a value that can't travel, and what `run` raises.
        """
        raise NotImplementedError

    def stacks(self) -> str:
        """Where every rank is now, with the lines of the cells; takes up to some seconds."""
        raise NotImplementedError

    def ask(self, how: Stop) -> None:
        """Ask for the end, from any thread, without waiting for it."""
        raise NotImplementedError

    def close(self) -> None:
        """End the workers, in order where they can: what runs is interrupted; comes back when all have ended."""
        raise NotImplementedError
