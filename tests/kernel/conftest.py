"""Kernels for the tests of this folder: two that they share, and fresh ones."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kernel.kernels import Kernel, kernel as started

Shared = Callable[[str], Kernel]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """Gives the kernel that shows runs in a way, of all tests that want such a one; started anew where one has ended it."""
    running: dict[str, Kernel] = {}
    with ExitStack() as stack:

        def get(panel: str) -> Kernel:
            if panel not in running or not running[panel].alive:
                folder = tmp_path_factory.mktemp("shared")
                running[panel] = stack.enter_context(started(folder, ACCELERATE_NB_PANEL=panel))
            running[panel].listeners.clear()
            return running[panel]

        yield get


@pytest.fixture
def kernel(shared: Shared) -> Kernel:
    """A kernel in which other tests have run cells before."""
    return shared("text")


@pytest.fixture
def panel_kernel(shared: Shared) -> Kernel:
    """The same, where a run is shown by its panel."""
    return shared("widget")


@pytest.fixture
def fresh_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel in which only the launchers have been imported."""
    with started(tmp_path) as running:
        yield running
