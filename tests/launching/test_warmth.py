"""A supervisor is loaded with what workers will need, and with nothing that would make forking unsafe."""

import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from accelerate_nb import launch, notebook_launcher
from accelerate_nb.errors import LaunchError
from accelerate_nb.launching.engines import supervisor as supervised
from accelerate_nb.launching.engines.supervisor import supervisors
from accelerate_nb.launching.launcher import warm_early
from accelerate_nb.supervisor.main import UNFIT
from accelerate_nb.transport.channel import Channel
from accelerate_nb.transport.messages import ForkWorker, Message, OpenGroup
from tests.waiting import TIMEOUT, until

pytestmark = pytest.mark.usefixtures("supervisor")


@pytest.fixture
def supervisor() -> Iterator[None]:
    """A supervisor of the test's own, with nothing learned before."""
    supervised.cool()
    held = supervised._warmth.get()
    held.preloads.clear()
    yield
    supervised.cool()
    held.preloads.clear()
    held.unfit.clear()


def is_loaded(name: str) -> bool:
    """In a worker: whether it found a module loaded."""
    return name in sys.modules


def loads(name: str) -> None:
    """In a worker: load a module."""
    __import__(name)


def sleeps_for(seconds: float) -> float:
    """In a worker: take a while."""
    time.sleep(seconds)
    return seconds


def becomes_loaded(name: str, idle: float = 0.0) -> bool:
    """Whether workers find a module loaded before the patience ends, where `idle` seconds pass before each launch."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        time.sleep(idle)
        if notebook_launcher(is_loaded, args=(name,), num_processes=1):
            return True
    return False


def test_a_worker_finds_loaded_what_a_former_one_loaded() -> None:
    assert not notebook_launcher(is_loaded, args=("nbformat.v4",), num_processes=1)
    notebook_launcher(loads, args=("nbformat",), num_processes=1)
    assert becomes_loaded("nbformat.v4")


def test_a_module_that_starts_a_thread_is_left_to_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    first = supervised.warm()
    supervised.preload(["starts_a_thread"])
    assert first.ended(TIMEOUT) == UNFIT
    with pytest.warns(UserWarning, match="starts_a_thread starts a thread or wakes a GPU as it is imported"):
        assert not notebook_launcher(is_loaded, args=("starts_a_thread",), num_processes=1)
    assert supervised.warm() is not first
    notebook_launcher(loads, args=("starts_a_thread",), num_processes=1)


# Libraries of which one starts a thread in pyarrow, as many do that notebooks import.
IMPORTED_BY_NOTEBOOKS = ("pandas", "sklearn.linear_model", "peft", "transformers.trainer")


def test_what_notebooks_import_is_loaded_ahead_in_one_supervisor() -> None:
    for name in IMPORTED_BY_NOTEBOOKS:
        pytest.importorskip(name.partition(".")[0])
    first = supervised.warm()
    supervised.preload(IMPORTED_BY_NOTEBOOKS)
    assert becomes_loaded("transformers.trainer")
    assert all(notebook_launcher(is_loaded, args=(name,), num_processes=1) for name in IMPORTED_BY_NOTEBOOKS)
    assert supervised.warm() is first


def variable_at_import() -> tuple[str | None, bool]:
    """In a worker: the variable that the installed module read as it was imported, and whether that was before this call."""
    was_loaded = "reads_a_variable" in sys.modules
    return __import__("reads_a_variable").VALUE, was_loaded


def loaded_ahead(value: str | None) -> bool:
    """Whether workers find the module loaded ahead before the patience ends, and the variable's value in it at any time."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        found, was_loaded = notebook_launcher(variable_at_import, num_processes=1)
        assert found == value
        if was_loaded:
            return True
    return False


def test_what_is_loaded_ahead_has_the_variables_and_the_version_of_this_moment(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    module = folder / "reads_a_variable.py"
    module.write_text("import os\nVALUE = os.environ.get('READ_AT_IMPORT')\nos.environ['SET_AT_IMPORT'] = '1'\n")
    monkeypatch.syspath_prepend(folder)
    supervised.warm()
    # set when the supervisor runs already
    monkeypatch.setenv("READ_AT_IMPORT", "first")
    assert loaded_ahead("first")
    first = supervised.warm()
    goes_on = launch(time.sleep, (600,), num_processes=1)
    until(lambda: first.idle_seconds() == 0)
    try:
        monkeypatch.setenv("READ_AT_IMPORT", "second")
        monkeypatch.setenv("READ_BY_NOBODY", "1")
        assert loaded_ahead("second")
        assert supervised.warm() is not first
        # a run of before keeps its supervisor
        assert first.usable()
        assert not goes_on.done
    finally:
        goes_on.stop()
    assert first.ended(TIMEOUT) is not None
    second = supervised.warm()
    monkeypatch.setenv("READ_BY_NOBODY", "2")
    assert loaded_ahead("second")
    assert supervised.warm() is second
    (folder / "reads_a_variable-2.0.dist-info").mkdir()
    module.write_text("VALUE = 'version 2'\n")
    assert loaded_ahead("version 2")
    assert supervised.warm() is not second


def test_a_module_that_cannot_be_loaded_changes_nothing() -> None:
    first = supervised.warm()
    supervised.preload(["there_is_no_such_module"])
    assert notebook_launcher(is_loaded, args=("torch",), num_processes=1)
    assert supervised.warm() is first


BROKEN = """
import sys
if hasattr(sys, "torch_was_tried"):
    raise RuntimeError("torch can only be initialized once per process")
sys.torch_was_tried = True
raise OSError("libcudart.so.13: cannot open shared object file: No such file or directory")
"""


@pytest.mark.parametrize("start_method", ["supervisor", "spawn"])
def test_a_torch_that_cannot_be_imported_is_reported_as_what_it_is(tmp_path, monkeypatch, start_method) -> None:
    package = tmp_path / "broken" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(BROKEN)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(package.parent)
        with pytest.raises(Exception, match=r"libcudart\.so\.13: cannot open shared object file") as caught:
            notebook_launcher(is_loaded, args=("torch",), num_processes=2, cpu=True, start_method=start_method)
    assert "once per process" not in str(caught.value)
    if start_method == "supervisor":
        assert isinstance(caught.value, LaunchError)
        assert "2 workers were requested" in str(caught.value)
        assert "Mend the installation" in str(caught.value)
    # what has been mended is found, without a new notebook
    assert notebook_launcher(is_loaded, args=("torch",), num_processes=1)


def test_what_an_optimizer_makes_torch_load_is_there_after_a_while() -> None:
    assert becomes_loaded("torch._dynamo", idle=2 * supervised._IDLE_BEFORE_LOADING)


@pytest.mark.parametrize("idle_timeout", [None, 1.0])
def test_after_a_supervisor_that_was_cooled_or_not_used_the_next_launch_starts_another(idle_timeout) -> None:
    first = supervised.warm(idle_timeout)
    if idle_timeout is None:
        supervised.cool()
    assert first.ended(TIMEOUT) is not None
    assert notebook_launcher(is_loaded, args=("torch",), num_processes=1)
    assert supervised.warm() is not first


def test_a_supervisor_that_is_started_early_has_the_idle_timeout_of_the_environment(monkeypatch, recwarn) -> None:
    monkeypatch.setenv("ACCELERATE_NB_SUPERVISOR_IDLE_TIMEOUT", "1")
    monkeypatch.setenv("ACCELERATE_NB_QUIET", "5")
    warm_early()
    handle = supervised._warmth.get().handle
    assert handle is not None
    assert handle.ended(TIMEOUT) is not None
    # the launch warns of a deprecated setting, and once is enough
    assert [warning for warning in recwarn if issubclass(warning.category, FutureWarning)] == []


def test_a_supervisor_does_not_end_while_its_workers_run() -> None:
    supervised.warm(0.5)
    assert notebook_launcher(sleeps_for, args=(3.0,), num_processes=1, supervisor_idle_timeout=0.5) == 3.0


def test_a_supervisor_stays_where_its_idle_timeout_is_zero() -> None:
    first = supervised.warm(1.0)
    assert supervised.warm(0) is first
    assert first.ended(2.0) is None


def test_the_memory_that_supervisors_hold_is_listed() -> None:
    handle = supervised.warm()
    assert notebook_launcher(is_loaded, args=("torch",), num_processes=1)
    held = supervisors()[str(handle.pid)]
    assert held["started_by"] == os.getpid()
    assert held["processes"] >= 1
    assert held["pss_mib"] > 20


class LeftAloneError(Exception):
    """Raised in place of the rest of a launch."""


def test_a_launch_that_is_left_before_its_last_rank_is_forked_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notebook_launcher(is_loaded, args=("torch",), num_processes=2)
    handle = supervised.warm()
    supervisor = psutil.Process(handle.pid)
    send = Channel.send

    def send_all_but_stay(channel: Channel, message: Message, descriptors: Sequence[int] = ()) -> None:
        if isinstance(message, ForkWorker) and message.worker.rank == 1:
            until(lambda: workers_of(supervisor))
            # it finds the request for rank 1 and the end of the launch at the same moment
            supervisor.suspend()
            send(channel, message, descriptors)
            near_ends[-1].close()
            raise LeftAloneError
        if isinstance(message, OpenGroup):
            near_ends.append(pairs[descriptors[0]])
        send(channel, message, descriptors)

    # other threads may make some, too
    pairs: dict[int, socket.socket] = {}
    near_ends: list[socket.socket] = []
    make_pair = socket.socketpair

    def keep_near_end() -> tuple[socket.socket, socket.socket]:
        near, far = make_pair()
        pairs[far.fileno()] = near
        return near, far

    monkeypatch.setattr(Channel, "send", send_all_but_stay)
    monkeypatch.setattr(supervised.socket, "socketpair", keep_near_end)
    try:
        with pytest.raises(LeftAloneError):
            notebook_launcher(time.sleep, args=(600,), num_processes=2)
    finally:
        supervisor.resume()
    # it has handled all requests from before when it has handled one more
    assert notebook_launcher(is_loaded, args=("torch",), num_processes=1)
    assert psutil.wait_procs(workers_of(supervisor), timeout=TIMEOUT)[1] == []


def workers_of(supervisor: psutil.Process) -> list[psutil.Process]:
    """The children of a supervisor that have a session of their own, as workers do."""
    return [child for child in supervisor.children() if os.getsid(child.pid) != os.getsid(supervisor.pid)]
