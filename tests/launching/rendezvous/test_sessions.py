"""Sessions that are started on each of their nodes: here both are of one process, and each has one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import ConfigurationError, HangError, LaunchError, WorkerError
from accelerate_nb.launching.rendezvous.session_conductor import SessionConductor
from accelerate_nb.launching.session.session import Session
from accelerate_nb.transport.messages import (
    BreakGroups,
    EndSession,
    Message,
    RebuildGroups,
)
from tests.launching.rendezvous.test_on_each_node import free_port

pytestmark = pytest.mark.timeout(60)

# Every rank takes part in a collective, and each sees the same sum.
TOGETHER = "import torch, torch.distributed as dist\nt = torch.full((2,), rank + 1.0)\ndist.all_reduce(t)\nt.tolist()"
# Each rank waits for what the other one never sends.
STUCK = "import torch, torch.distributed as dist\nprint('waits')\ndist.recv(torch.zeros(1), src=1 - rank)"


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Session]]:
    """The sessions of node 0 and of node 1, for all tests: each promises by `works` that it leaves them as it found them."""
    folder, port = tmp_path_factory.mktemp("runs"), free_port()

    def node(rank: int) -> Session:
        settings = {"num_processes": 2, "num_nodes": 2, "node_rank": rank, "use_port": port, "cpu": True}
        return Session.start(resolve({**settings, "folder": str(folder)}, {}))

    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(node, range(2)))
    yield both
    both[0].close()


def errors(sessions: list[Session], source: str, timeout: float | None = None) -> list[BaseException | None]:
    """How the same cell in both notebooks ends."""
    cells = [session.run(source, number=7, timeout=timeout) for session in sessions]
    for cell in cells:
        cell.wait(throw=False)
    return [cell.error for cell in cells]


def works(sessions: list[Session]) -> None:
    cells = [session.run(TOGETHER) for session in sessions]
    found = [[(end.rank, end.result) for end in cell.wait()] for cell in cells]
    assert found == [[(rank, {"text/plain": "[3.0, 3.0]"})] for rank in range(2)]


def test_a_cell_runs_on_the_ranks_of_its_own_node(sessions: list[Session]) -> None:
    works(sessions)
    host, other = sessions
    host.push({"x": 3})
    other.run("x = 10 * rank").wait()
    assert (host.pull(["x"]), other.pull(["x"])) == ({0: {"x": 3}}, {1: {"x": 10}})
    assert (host.ranks, other.ranks, host.size) == ((0,), (1,), 2)
    assert [end.value for end in other.call(pow, (2, 3)).wait()] == [8]
    with pytest.raises(ConfigurationError, match=r"the session's ranks on this machine are 1\."):
        other.run("rank", ranks=(0,))


@pytest.mark.parametrize("failing", range(2))
def test_a_failure_on_one_node_ends_the_cell_that_waits_for_it_on_the_other(
    sessions: list[Session], failing: int
) -> None:
    source = f"if rank == {failing}:\n    raise ValueError('no')\n{TOGETHER}"
    found = errors(sessions, source)
    assert isinstance(found[failing], ValueError)
    assert f"rank {failing} stopped with ValueError: no" in str(found[failing])
    because = found[1 - failing]
    assert isinstance(because, WorkerError)
    assert f"rank {failing} of node {failing} on " in str(because)
    assert "stopped with ValueError: no; this cell was ended because of it." in str(because)
    works(sessions)


def test_failures_on_both_nodes_are_each_their_own(sessions: list[Session]) -> None:
    found = errors(sessions, "[][rank]")
    assert all(f"rank {rank} stopped with IndexError" in str(error) for rank, error in enumerate(found))
    works(sessions)


@pytest.mark.parametrize("interrupted", range(2))
def test_an_interrupt_on_one_node_frees_ranks_that_wait_for_each_other(
    sessions: list[Session], interrupted: int
) -> None:
    cells = [session.run(STUCK, number=7) for session in sessions]
    for rank, cell in enumerate(cells):
        until(lambda rank=rank, cell=cell: [line.text for line in cell.view.tail(rank, 1)] == ["waits"])
    cells[interrupted].interrupt()
    for cell in cells:
        cell.wait(throw=False)
    assert isinstance(cells[interrupted].error, KeyboardInterrupt)
    assert f"Cell In[7] of node {interrupted} on " in str(cells[1 - interrupted].error)
    assert "was interrupted; this cell was ended" in str(cells[1 - interrupted].error)
    works(sessions)


def test_a_time_limit_of_one_node_ends_the_cell_of_the_other(sessions: list[Session]) -> None:
    host, other = sessions
    waits, late = host.run(TOGETHER), other.run("import time; time.sleep(600)", number=7, timeout=0.1)
    late.wait(throw=False)
    waits.wait(throw=False)
    assert isinstance(late.error, HangError)
    assert "had not ended after timeout=0.1 s; this cell was ended" in str(waits.error)
    works(sessions)


def test_a_failure_where_the_other_node_runs_nothing_holds_up_neither(sessions: list[Session]) -> None:
    other = sessions[1]
    with pytest.raises(ZeroDivisionError):
        other.run("1 / 0").wait()
    # no cell of the other notebook is needed
    assert [end.result for end in other.run("rank").wait()] == [{"text/plain": "1"}]
    works(sessions)


def test_a_failed_cell_is_done_when_its_node_knows_of_the_new_groups(
    sessions: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, reports = sessions[1], list[Message]()
    with monkeypatch.context() as patch:
        patch.setattr(other._nodes, "report", reports.append)
        cell = other.run("1 / 0")
        until(lambda: bool(cell.ends))
        with other._tasks.lock:
            assert not cell.done
    assert other._nodes is not None
    for report in reports:
        other._nodes.report(report)
    cell.wait(throw=False)
    works(sessions)


def test_the_end_on_one_node_is_the_end_on_all(sessions: list[Session]) -> None:
    host, other = sessions
    cell = host.run("import time; time.sleep(600)")
    other.close()
    cell.wait(throw=False)
    assert "the session was closed on node 1 on " in str(cell.error)
    until(lambda: host.done)
    assert other.done
    assert other.error is None
    with pytest.raises(LaunchError, match="has ended: the session was closed on node 1 on "):
        host.run("rank")


def test_of_failures_at_once_the_first_makes_one_new_generation_for_all() -> None:
    came: list[Message] = []
    ended = threading.Event()

    def take(message: Message) -> None:
        came.append(message)
        if isinstance(message, EndSession):
            ended.set()

    conductor = SessionConductor([], take)
    for node, report in [
        ("a", BreakGroups(0, "first")),
        ("b", BreakGroups(0, "at once")),
        ("b", BreakGroups(1, "later")),
        ("a", EndSession("closed")),
        ("b", BreakGroups(2, "too late")),
        ("b", EndSession("closed, too")),
    ]:
        conductor.take(node, report)
    conductor.close()
    assert ended.wait(10)
    assert came == [RebuildGroups(1, "a", "first"), RebuildGroups(2, "b", "later"), EndSession("closed")]


def until(condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if condition():
            return
        threading.Event().wait(0.05)
    raise AssertionError
