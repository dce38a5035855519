"""Kernels for the tests of this folder: one that they share, and fresh ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kernel.kernels import Kernel, kernel as started


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Kernel]]:
    """The shared kernel, started anew where a test has ended it."""
    running: list[Kernel] = []
    with ExitStack() as stack:

        def get() -> Kernel:
            if not running or not running[-1].alive:
                running.append(stack.enter_context(started(tmp_path_factory.mktemp("shared"))))
            return running[-1]

        yield get


@pytest.fixture
def kernel(_shared: Callable[[], Kernel]) -> Kernel:
    """A kernel in which other tests have run cells before."""
    return _shared()


@pytest.fixture
def fresh_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel in which only the launchers have been imported."""
    with started(tmp_path) as running:
        yield running
