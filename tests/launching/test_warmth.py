"""A supervisor is loaded with what workers will need, and with nothing that would make forking unsafe."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelerate_nb import notebook_launcher
from accelerate_nb.launching.engines import supervised

# How long a supervisor may take to be where a test wants it.
PATIENCE = 60.0


@pytest.fixture
def supervisor() -> Iterator[None]:
    """A supervisor of the test's own, with nothing learned before."""
    supervised.cool()
    held = supervised._warmth.get()
    held.hints.clear()
    yield
    supervised.cool()
    held.hints.clear()
    held.unfit.clear()


def is_loaded(name: str) -> bool:
    """In a worker: whether it found a module loaded."""
    return name in sys.modules


def loads(name: str) -> None:
    """In a worker: load a module."""
    __import__(name)


def becomes_loaded(name: str) -> bool:
    """Whether workers find a module loaded before the patience ends."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if notebook_launcher(is_loaded, args=(name,), num_processes=1):
            return True
    return False


@pytest.mark.usefixtures("supervisor")
def test_a_worker_finds_loaded_what_a_former_one_loaded() -> None:
    assert not notebook_launcher(is_loaded, args=("nbformat.v4",), num_processes=1)
    notebook_launcher(loads, args=("nbformat",), num_processes=1)
    assert becomes_loaded("nbformat.v4")


@pytest.mark.usefixtures("supervisor")
def test_a_module_that_the_notebook_uses_is_loaded_before_the_first_launch() -> None:
    supervised.warm()
    supervised.hint(["nbclient"])
    assert becomes_loaded("nbclient")


@pytest.mark.usefixtures("supervisor")
def test_a_module_that_starts_a_thread_is_left_to_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    first = supervised.warm()
    supervised.hint(["starts_a_thread"])
    assert first.ended(PATIENCE) == supervised.UNFIT
    assert not notebook_launcher(is_loaded, args=("starts_a_thread",), num_processes=1)
    assert supervised.warm() is not first
    notebook_launcher(loads, args=("starts_a_thread",), num_processes=1)


@pytest.mark.usefixtures("supervisor")
def test_a_module_that_cannot_be_loaded_changes_nothing() -> None:
    first = supervised.warm()
    supervised.hint(["there_is_no_such_module"])
    assert notebook_launcher(is_loaded, args=("torch",), num_processes=1)
    assert supervised.warm() is first


@pytest.mark.usefixtures("supervisor")
def test_a_cooled_supervisor_is_gone_and_the_next_launch_starts_another() -> None:
    first = supervised.warm()
    supervised.cool()
    assert first.ended(PATIENCE) is not None
    assert notebook_launcher(is_loaded, args=("torch",), num_processes=1)


@pytest.mark.usefixtures("supervisor")
def test_what_an_optimizer_makes_torch_load_is_there_after_a_while() -> None:
    assert becomes_loaded("torch._dynamo")
