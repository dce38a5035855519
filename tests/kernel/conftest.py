"""Kernels for the tests of this folder: two that they share, and fresh ones."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.kernel.kernels import Kernel, kernel as started

Shared = Callable[[], Kernel]


@contextmanager
def _shared(folders: pytest.TempPathFactory, **environment: str) -> Iterator[Shared]:
    """A kernel that many tests use, started anew where one has ended it."""
    running: list[Kernel] = []
    with ExitStack() as stack:

        def get() -> Kernel:
            if not running or not running[-1].alive:
                running.append(stack.enter_context(started(folders.mktemp("shared"), **environment)))
            running[-1].listeners.clear()
            return running[-1]

        yield get


@pytest.fixture(scope="session")
def _with_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with _shared(tmp_path_factory) as get:
        yield get


@pytest.fixture(scope="session")
def _with_panels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with _shared(tmp_path_factory, ACCELERATE_NB_PANEL="widget") as get:
        yield get


@pytest.fixture
def kernel(_with_text: Shared) -> Kernel:
    """A kernel in which other tests have run cells before."""
    return _with_text()


@pytest.fixture
def panel_kernel(_with_panels: Shared) -> Kernel:
    """The same, where a run is shown by its panel."""
    return _with_panels()


@pytest.fixture
def fresh_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel in which only the launchers have been imported."""
    with started(tmp_path) as running:
        yield running
