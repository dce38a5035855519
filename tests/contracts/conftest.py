"""The engines that keep one contract, each as a record of how it is asked for."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb import Run, launch


@dataclass(frozen=True)
class Engine:
    """
    A way to start workers.

    `size` is how many it runs in these tests, `isolated` whether they are processes of their own, `limit` the seconds
    within which they have certainly begun.
    """

    name: str
    settings: dict[str, Any]
    size: int
    isolated: bool
    limit: float
    folder: Path

    def launch(self, function: Any, args: Any = (), kwargs: Any = None, **settings: Any) -> Run:
        """Start the function; nothing is read from this machine's configuration."""
        asked = {"num_processes": self.size, "folder": str(self.folder), "cpu": True, "results": "all", **self.settings}
        return launch(function, args, kwargs, config_file="", **{**asked, **settings})

    def run(self, function: Any, *args: Any, **settings: Any) -> Any:
        """Start the function and wait for it."""
        return self.launch(function, args, **settings).wait(60)


ENGINES: dict[str, tuple[dict[str, Any], int, float]] = {
    "inline": ({"engine": "inline"}, 1, 1),
    "supervisor": ({"start_method": "supervisor"}, 2, 1.5),
    "fork": ({"start_method": "fork"}, 2, 1.5),
    "spawn": ({"start_method": "spawn"}, 2, 5),
}


@pytest.fixture(params=ENGINES, scope="module")
def engine(request, tmp_path_factory) -> Engine:
    """Each engine in its turn, awake already."""
    settings, size, limit = ENGINES[request.param]
    folder = tmp_path_factory.mktemp(f"runs_{request.param}")
    return Engine(request.param, settings, size, request.param != "inline", limit, folder)


@pytest.fixture
def isolated(engine) -> Engine:
    """The engine, where it has processes of its own."""
    if not engine.isolated:
        pytest.skip(
            "the function runs in this very process: it can't be ended from outside, nor have another environment"
        )
    return engine


@pytest.fixture
def cell() -> Iterator[Any]:
    """Runs text as a notebook's cell: in `__main__`, with its lines known under a name that is no file."""
    main = sys.modules["__main__"]
    before = dict(vars(main))
    names = []

    def run(text: str) -> Any:
        name = f"<cell {len(names) + 1}>"
        names.append(name)
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), vars(main))
        return main

    yield run
    vars(main).clear()
    vars(main).update(before)
    for name in names:
        linecache.cache.pop(name, None)
