"""What is stopped before anything has begun ends at once, however long the processes take to start."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from accelerate_nb import StoppedError, launch, notebook_launcher
from accelerate_nb.config.run_config import resolve
from accelerate_nb.launching.engines import supervisor
from accelerate_nb.launching.session import Session
from tests.waiting import until

TWO = {"num_processes": 2, "cpu": True}
# Far less than the processes would take, which is for ever, and than the grace that ranks have which do something.
AT_ONCE = 5.0
STOP_GRACE_PERIOD = 60.0
# Python imports it before anything else, in the processes that fork workers or are workers.
HELD = """
import os, sys, time
if {{"accelerate_nb.supervisor.main", "accelerate_nb.worker.main"}} & set(sys.orig_argv):
    open({folder!r} + "/starts", "a").close()
    while os.path.exists({folder!r} + "/held"):
        time.sleep(0.01)
"""


class Cold:
    """A folder to be put on `PYTHONPATH`: what starts with it there waits until it is released."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "held").touch()
        (folder / "sitecustomize.py").write_text(HELD.format(folder=str(folder)))

    @property
    def starts(self) -> bool:
        """Whether a process has started, and waits."""
        return (self.folder / "starts").exists()

    def release(self) -> None:
        """Let them go on."""
        (self.folder / "held").unlink(missing_ok=True)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cold]:
    supervisor.cool()
    made = Cold(tmp_path / "cold")
    monkeypatch.syspath_prepend(made.folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(made.folder), os.environ["PYTHONPATH"]]))
    yield made
    made.release()
    supervisor.cool()


def leaves_a_trace(folder: str) -> int:
    Path(folder, f"began_{os.environ['RANK']}").touch()
    return int(os.environ["RANK"])


@pytest.mark.parametrize("start_method", ["supervisor", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_run_that_has_not_begun_ends_at_once_and_the_next_one_works(cold, tmp_path, start_method):
    settings = {**TWO, "stop_grace_period": STOP_GRACE_PERIOD, "start_method": start_method}
    for how in ("finish", "interrupt", "kill"):
        run = launch(leaves_a_trace, (str(tmp_path),), **settings)
        until(lambda: cold.starts)
        began = time.monotonic()
        run.request_stop(how)
        with pytest.raises(StoppedError):
            run.wait(STOP_GRACE_PERIOD)
        assert time.monotonic() - began < AT_ONCE
        assert {run.view.rank(rank).state for rank in range(2)} == {"stopped"}
    cold.release()
    assert notebook_launcher(int, ("7",), **settings) == 7
    assert not list(tmp_path.glob("began_*"))


@pytest.mark.slow
def test_a_session_that_has_not_begun_ends_at_once_and_the_next_one_works(cold):
    def interrupt() -> None:
        until(lambda: cold.starts)
        os.kill(os.getpid(), signal.SIGINT)

    config = resolve({**TWO, "stop_grace_period": STOP_GRACE_PERIOD}, {})
    began = time.monotonic()
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        Session.start(config)
    assert time.monotonic() - began < AT_ONCE
    cold.release()
    Session.start(config).close()
