"""The places where ranks run that keep one contract, each as a record of how it is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb import Run, launch
from accelerate_nb.config.run_config import resolve
from accelerate_nb.launching.session import Session
from tests.waiting import until


@dataclass(frozen=True)
class Engine:
    """A way to start `size` workers; `isolated` are those in processes of their own."""

    name: str
    settings: dict[str, Any]
    size: int
    isolated: bool
    folder: Path

    def launch(self, function: Any, args: Any = (), kwargs: Any = None, **settings: Any) -> Run:
        """Start the function; nothing is read from this machine's configuration."""
        options = {"num_processes": self.size, "folder": str(self.folder), "cpu": True, "results": "all"}
        return launch(function, args, kwargs, config_file="", **{**options, **self.settings, **settings})

    def run(self, function: Any, *args: Any, **settings: Any) -> Any:
        """Start the function and wait for it."""
        return self.launch(function, args, **settings).wait(60)

    def close(self) -> None:
        """Nothing stays."""


@dataclass
class SessionExecutor:
    """A session that is asked to call functions; one that has ended is started again."""

    name: str
    settings: dict[str, Any]
    folder: Path
    size: int = 2
    isolated: bool = True
    session: Session | None = field(default=None, repr=False)

    def launch(self, function: Any, args: Any = (), kwargs: Any = None, *, timeout: float | None = None) -> Run:
        """Ask for a call."""
        if self.session is None or not self.session.alive:
            options = {"num_processes": self.size, "folder": str(self.folder), "cpu": True, "stop_grace_period": 0.5}
            self.session = Session.start(resolve({**options, **self.settings}, {}))
        return self.session.call(function, args, kwargs, timeout=timeout)

    def run(self, function: Any, *args: Any, **settings: Any) -> Any:
        """Ask for a call and wait for it."""
        return [end.value for end in self.launch(function, args, **settings).wait()]

    def close(self) -> None:
        """End the session."""
        if self.session is not None:
            self.session.close()


_XLA = {"engine": "xla", "cpu": False}
STARTS: dict[str, tuple[dict[str, Any], int]] = {
    "inline": ({"engine": "inline"}, 1),
    "supervisor": ({"start_method": "supervisor"}, 2),
    "fork": ({"start_method": "fork"}, 2),
    "spawn": ({"start_method": "spawn"}, 2),
    "nodes": ({"engine": "local", "num_nodes": 2}, 2),
    "xla": (_XLA, 2),
}
# A session's ranks have processes of their own.
SESSIONS = {f"session-{name}": name for name in STARTS if name != "inline"}


def executor_of(name: str, folder: Path) -> Engine | SessionExecutor:
    """The engine or the session of this name."""
    if name in SESSIONS:
        settings, size = STARTS[SESSIONS[name]]
        return SessionExecutor(name, settings, folder, size)
    settings, size = STARTS[name]
    return Engine(name, settings, size, name != "inline", folder)


@contextmanager
def process_environment(name: str) -> Iterator[None]:
    """Inside the block this process is where such a place can be: torch_xla computes on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if "xla" in name:
            patch.setenv("PJRT_DEVICE", "CPU")
            patch.delenv("CPU_NUM_DEVICES", raising=False)
        yield


def wait_for_ranks(run: Run, folder: str | Path, size: int) -> None:
    """Wait until every rank has said that it is there."""
    until(lambda: len(list(Path(folder).glob("here_*"))) == size, run)
    # the files are there before the run has read what the ranks say
    until(lambda: all(run.view.rank(rank).state == "running" for rank in range(size)), run)
