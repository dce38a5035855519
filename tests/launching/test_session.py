"""A session keeps its workers from one cell to the next, and whatever a cell does, the next one can run."""

import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import closing

import psutil
import pytest
import torch

from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import ConfigurationError, HangError, LaunchError, PayloadError, WorkerError
from accelerate_nb.events.event_types import Display, LogLine
from accelerate_nb.events.run_reader import kept_run
from accelerate_nb.launching.run import FrontEnd
from accelerate_nb.launching.session import Session
from tests.waiting import until

LOSES_SIGNALS = pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="it loses signals after a thread's fork")
# Every rank takes part in a collective, and each sees the same sum.
TOGETHER = "import torch, torch.distributed as dist\nt = torch.full((2,), rank + 1.0)\ndist.all_reduce(t)\nt.tolist()"


def start(tmp_path, **settings):
    return Session.start(resolve({"num_processes": 2, "cpu": True, "folder": str(tmp_path), **settings}, {}))


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """One session for all tests that leave it as they found it, which each of them promises by `works`."""
    with closing(start(tmp_path_factory.mktemp("runs"))) as kept:
        yield kept


@pytest.fixture
def fresh_session(tmp_path):
    """A session that a test may end."""
    with closing(start(tmp_path)) as kept:
        yield kept


def shown(session, text, **settings):
    """The text of each rank's result."""
    return [end.result["text/plain"] for end in session.run(text, **settings).wait()]


def works(session):
    assert shown(session, TOGETHER) == ["[3.0, 3.0]"] * 2


def lines(cell):
    return [(entry.rank, entry.text) for entry in cell.view.since(0).items if isinstance(entry, LogLine)]


def pids(session):
    return [int(text) for text in shown(session, "import os\nos.getpid()")]


def error_of(cell):
    cell.wait_until_over(None)
    return cell.error


def test_the_ranks_of_a_silent_cell_are_located(tmp_path):
    with closing(start(tmp_path, hang_warning_after=0.5)) as session:
        # a session that has nothing to do is no silence
        time.sleep(1.5)
        assert not session.view.idle_warning
        cell = session.run(
            "import time, torch.distributed as dist\nif rank == 0: dist.barrier()\nelse: time.sleep(60)", number=7
        )
        until(lambda: session.view.idle_warning)
        text = session.view.idle_warning.text
        assert "rank 0 waits in barrier, at Cell In[7], line 2" in text
        assert "rank 1 is elsewhere" in text
        cell.interrupt()
        cell.wait_until_over(None)
        until(lambda: session.view.idle_warning is None)
        works(session)
        # a rank that has returned from the cell does not come
        error = error_of(session.run("import torch\nif rank == 0: accelerator.gather(torch.ones(2))"))
        assert isinstance(error, HangError)
        assert "rank 0 waits in gather" in str(error)
        assert "rank 1 has returned already" in str(error)
        works(session)


# --------------------------------------------------------------------------------------------------------------- cells


def test_variables_stay_from_cell_to_cell_and_some_are_there_from_the_start(session):
    session.run("kept = type(accelerator).__name__, rank, world_size, str(device)").wait()
    assert shown(session, "kept") == [f"('Accelerator', {rank}, 2, 'cpu')" for rank in (0, 1)]


def test_a_session_that_goes_on_takes_another_name(session):
    session.adjust(name="probe", tags="a,b")
    saved = kept_run(session.folder)
    assert (session.name, saved.name, saved.tags, saved.state) == ("probe", "probe", ("a", "b"), "running")
    works(session)


def test_all_that_a_cell_wrote_is_there_when_it_is_done(session):
    for _ in range(20):
        cell = session.run(
            "import os, sys\nprint('out')\nprint('err', file=sys.stderr)\nos.write(1, b'raw\\n')\nprint('end', end='')"
        )
        cell.wait()
        for rank in (0, 1):
            assert sorted(text for who, text in lines(cell) if who == rank) == ["end", "err", "out", "raw"]


def test_a_cell_on_some_ranks_leaves_the_others_alone(session):
    (end,) = session.run("rank", ranks=[1]).wait()
    assert (end.rank, end.result["text/plain"]) == (1, "1")
    works(session)


def test_cells_have_magics_await_shells_and_results(session):
    repeats = "import asyncio\nawait asyncio.sleep(0)\nx = %timeit -n1 -r1 -o -q 1\nx.repeat"
    assert shown(session, repeats, ranks=[0]) == ["1"]
    cell = session.run("!echo from the shell", ranks=[0])
    cell.wait()
    assert lines(cell) == [(0, "from the shell")]
    session.run("before = %pwd\n%cd -q /\n%matplotlib inline", ranks=[0]).wait()
    assert shown(session, "import os\nhere = os.getcwd()\nos.chdir(before)\nhere", ranks=[0]) == ["'/'"]
    session.run("40 + 2", number=5).wait()
    assert shown(session, "_ + Out[5]") == ["84", "84"]


def test_displays_and_figures_arrive_and_one_with_an_id_is_replaced(session):
    pytest.importorskip("matplotlib")
    cell = session.run(
        "from IPython.display import HTML\nimport matplotlib.pyplot as plt\nhandle = display(HTML('one'), display_id='it')\n"
        "handle.update(HTML('two'))\nfigure = plt.figure()\nplt.plot([1, 2]);",
        ranks=[0],
    )
    cell.wait()
    *texts, figure = [entry for entry in cell.view.since(0).items if isinstance(entry, Display)]
    assert [(entry.data["text/html"], entry.name, entry.update) for entry in texts] == [
        ("one", "it", False),
        ("two", "it", True),
    ]
    assert set(figure.data) - {"text/plain"} == {"image/png"}


def test_a_result_comes_with_its_metadata(session):
    (end,) = session.run(
        "class Wide:\n    def _repr_html_(self): return '<b>', {'isolated': True}\nWide()", ranks=[0]
    ).wait()
    assert end.result["text/html"] == "<b>"
    assert end.metadata == {"text/html": {"isolated": True}}


def test_a_warning_names_the_cell_and_its_line(session):
    cell = session.run("import warnings\nwarnings.warn('careful')", number=12, ranks=[1])
    cell.wait()
    assert [text for _, text in lines(cell)] == [
        "Cell In[12], line 2: UserWarning: careful",
        "  warnings.warn('careful')",
    ]


def test_the_names_of_variables_are_known_without_asking(session):
    session.run("only_on_1 = 3", ranks=[1]).wait()
    assert {"only_on_1", "accelerator", "rank"} <= set(session.names)
    session.run("del only_on_1", ranks=[1]).wait()
    assert "only_on_1" not in session.names


def test_ranks_without_a_cell_are_not_queried_where_they_are(session):
    assert session.stacks() == "Every rank waits for a cell."


def test_steps_are_counted_anew_in_each_cell(session):
    imports = "from accelerate_nb.rank.step_hold import current_step_hold\n"
    session.run(f"{imports}current_step_hold().steps = 5").wait()
    assert shown(session, f"{imports}current_step_hold().steps") == ["0", "0"]


def test_what_is_written_while_nothing_runs_arrives(session):
    session.run(
        "import os, threading\nwrite_now = threading.Event()\n"
        "threading.Thread(target=lambda: (write_now.wait(60), os.write(1, b'late\\n')), daemon=True).start()",
        ranks=[0],
    ).wait()
    cursor = session.view.since(0).cursor
    (agent,) = session.conductor._worker_group._agents
    # the pipes are watched, and not looked into
    until(lambda: agent._pipes.fileno() in agent._loop._selector.get_map())
    session.run("write_now.set()", ranks=[0]).wait()
    until(lambda: "late" in [entry.text for entry in session.view.since(cursor).items])


def test_an_error_and_its_cause_name_the_cell_and_its_line(session):
    text = "\ndef broken():\n    return {}['key']\ntry:\n    broken()\nexcept KeyError as error:\n    raise ValueError from error"
    error = error_of(session.run(text, number=7, first_line=2))
    assert isinstance(error, WorkerError)
    assert isinstance(error, ValueError)
    assert isinstance(error.__cause__, KeyError)
    assert "Cell In[7], line 4, in broken\n    return {}['key']" in str(error)
    assert "Cell In[7], line 8, in <module>" in str(error)
    assert "IPython" not in str(error)
    assert [frame.lineno for frame in traceback.extract_tb(error.__cause__.__traceback__)] == [6, 4]


def test_a_syntax_error_names_the_cell(session):
    error = error_of(session.run("x = (1,\ny = 2", number=8))
    assert isinstance(error, SyntaxError)
    assert 'File "Cell In[8]", line 1' in str(error)
    assert "IPython" not in str(error)


@pytest.mark.parametrize("code", ["", "0", "3", "[1]"])
def test_an_exit_ends_the_cell_and_not_the_worker(session, code):
    before = pids(session)
    error = error_of(session.run(f"import sys\nsys.exit({code})"))
    assert (error is None) == (code in {"", "0"})
    assert error is None or f"SystemExit: {code}" in str(error)
    assert pids(session) == before


def test_a_rank_does_one_thing_at_a_time(session):
    with pytest.raises(ConfigurationError, match="ranks are 0-1"):
        session.run("1", ranks=[2])
    cell = session.run("import threading\nthreading.Event().wait(60)", number=3)
    with pytest.raises(LaunchError, match=r"busy with Cell In\[3\]"):
        session.run("1", ranks=[1])
    cell.stop()
    assert isinstance(cell.error, KeyboardInterrupt)
    works(session)


def test_a_cell_before_which_groups_cannot_be_rebuilt_is_refused_and_leaves_nothing(session):
    busy = session.run("import threading\nthreading.Event().wait(60)", number=3, ranks=[0])
    stopped = session.run("while True: pass", ranks=[1])
    stopped.interrupt()
    assert isinstance(error_of(stopped), KeyboardInterrupt)
    with pytest.raises(LaunchError, match=r"rank 0, still busy with Cell In\[3\]"):
        session.run("1", ranks=[1])
    assert [cell.name for cell in session.busy] == ["Cell In[3]"]
    busy.interrupt()
    error_of(busy)
    works(session)


# -------------------------------------------------------------------------------------------------------------- values


def test_values_go_there_and_come_back(session):
    session.push({"pushed": {"tensor": torch.arange(6.0).reshape(2, 3).T, "text": "é"}})
    found = session.pull(["pushed"], ranks=(0, 1))
    for rank in (0, 1):
        assert torch.equal(found[rank]["pushed"]["tensor"], torch.arange(6.0).reshape(2, 3).T)


def test_tensors_come_back_without_their_history_and_classes_of_a_cell_do(session):
    session.run(
        "w = torch.ones(2, requires_grad=True)\nloss = (w * 3).sum()\nmodel = torch.nn.Linear(2, 1)\n"
        "class Point:\n    def __init__(self): self.x = 3\npoint = Point()"
    ).wait()
    found = session.pull(["loss", "model", "point"])[0]
    assert found["loss"].item() == 6
    assert not found["loss"].requires_grad
    assert isinstance(found["model"].weight, torch.nn.Parameter)
    assert found["point"].x == 3


def test_large_values_travel(session):
    session.push({"large": torch.full((50_000_000,), 3, dtype=torch.float32)})
    session.run("large += rank").wait()
    assert session.pull(["large"], ranks=(1,))[1]["large"][-1].item() == 4
    session.run("del large").wait()


def test_what_cannot_travel_or_is_not_there_is_named(session):
    with pytest.raises(PayloadError, match="'lock'"):
        session.push({"lock": threading.Lock()})
    session.run("stuck, known = __import__('threading').Lock(), 1").wait()
    with pytest.raises(PayloadError, match=r"variables\['stuck'\] is a lock, which can't be sent to the notebook"):
        session.pull(["stuck"])
    with pytest.raises(NameError, match=r"'unknown'.*There are: .*accelerator.*known"):
        session.pull(["unknown"])
    works(session)


def test_a_class_of_the_notebook_is_itself_when_it_comes_back(session, monkeypatch):
    main = sys.modules["__main__"]
    exec("class Mine:\n    pass", vars(main))
    try:
        session.push({"mine": main.Mine()})
        assert type(session.pull(["mine"])[0]["mine"]) is main.Mine
    finally:
        del main.Mine


# -------------------------------------------------------------------------------------------------------------- faults

WAITS = {
    "all_reduce": "dist.all_reduce(torch.ones(1))",
    "barrier": "dist.barrier()",
    "gather": "accelerator.gather(torch.ones(1))",
    "object": "objects = [None] * world_size\ndist.all_gather_object(objects, rank)",
    "backward": "model(torch.ones(1, 2)).sum().backward()",
    "loop": "while True: pass",
    "store": "dist.distributed_c10d._get_default_store().get('never')",
}
PREPARED = (
    "import torch, torch.distributed as dist\ntorch.manual_seed(0)\nmodel = accelerator.prepare(torch.nn.Linear(2, 1))"
)


@pytest.mark.parametrize("how", WAITS)
def test_an_error_frees_the_rank_that_waits_for_its_own(session, how):
    session.run(PREPARED).wait()
    before = pids(session)
    error = error_of(session.run(f"if rank == 1:\n    raise LookupError('the cause')\n{WAITS[how]}"))
    assert isinstance(error, LookupError)
    assert error.rank == 1
    works(session)
    assert pids(session) == before
    session.run("model(torch.ones(1, 2)).sum().backward()").wait()


@pytest.mark.parametrize("how", WAITS)
def test_an_interrupt_ends_the_cell_and_not_the_session(session, how):
    session.run(PREPARED).wait()
    before = pids(session)
    cell = session.run(f"print('there')\nif rank == 0:\n    {WAITS[how].replace(chr(10), chr(10) + '    ')}")
    reached(cell)
    cell.interrupt()
    assert isinstance(error_of(cell), KeyboardInterrupt)
    works(session)
    assert pids(session) == before


def test_an_interrupt_while_an_earlier_one_is_reported_comes_too_late(session):
    def interrupted():
        later = [signal.SIGINT]

        class Interrupted(KeyboardInterrupt):
            __notes__ = property(lambda _: [signal.raise_signal(later.pop())] if later else [])

        print("there")
        try:
            threading.Event().wait()
        except KeyboardInterrupt as error:
            raise Interrupted from error

    cell = session.call(interrupted)
    reached(cell)
    cell.interrupt()
    assert isinstance(error_of(cell), KeyboardInterrupt)
    works(session)


def reached(cell):
    """Wait until rank 0 of the cell has written its first line."""
    until(lambda: (0, "there") in lines(cell), cell)


def test_training_goes_on_with_right_gradients_after_groups_were_renewed(session):
    session.run(PREPARED + "\noptimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))").wait()
    step = (
        "optimizer.zero_grad()\nmodel(torch.full((1, 2), rank + 1.0)).sum().backward()\n"
        "grad = model.module.weight.grad.clone()\noptimizer.step()\nweight = model.module.weight.detach().clone()"
    )
    for _ in range(3):
        session.run(step).wait()
        found = session.pull(["grad", "weight"], ranks=(0, 1))
        assert torch.equal(found[0]["grad"], torch.full((1, 2), 1.5))
        assert torch.equal(found[0]["grad"], found[1]["grad"])
        assert torch.equal(found[0]["weight"], found[1]["weight"])
        error_of(session.run("if rank == 0:\n    raise LookupError\nmodel(torch.ones(1, 2)).sum().backward()"))


def test_a_collective_that_some_ranks_never_began_spoils_nothing_later(session):
    error_of(session.run(f"{TOGETHER}\nif rank == 1: raise LookupError\nwork = dist.all_reduce(t, async_op=True)"))
    works(session)


def test_groups_of_the_persons_own_outlive_an_error_on_all_ranks_and_are_missed_after_a_renewal(session):
    session.run("import torch, torch.distributed as dist\nmine = dist.new_group([0, 1])").wait()
    error_of(session.run("1 / 0"))
    session.run("dist.all_reduce(torch.ones(1), group=mine)").wait()
    error_of(session.run("if rank == 1: raise LookupError\ndist.barrier()"))
    error = error_of(session.run("dist.all_reduce(torch.ones(1), group=mine)"))
    assert "your own groups (new_group, device meshes) are gone" in str(error)
    works(session)


HOLDS = """
import torch, weakref
held = []
def fails():
    large = torch.ones(8)
    held.append(weakref.ref(large))
    raise MemoryError("full")
def fails_after_that():
    try:
        fails()
    except MemoryError:
        raise ValueError("and again")
"""


@pytest.mark.parametrize("call", ["fails()", "fails_after_that()"])
def test_what_a_failed_cell_held_is_free_when_the_next_begins(session, call):
    session.run(HOLDS).wait()
    assert error_of(session.run(call)) is not None
    assert shown(session, "(len(held), held[0]() is None)") == ["(1, True)"] * 2
    works(session)


def test_a_worker_that_dies_ends_the_session_with_its_last_words(fresh_session):
    fresh_session.run("print('of a former cell')").wait()
    error = error_of(
        fresh_session.run(f"import os\nif rank == 1:\n    print('last words', flush=True)\n    os._exit(3)\n{TOGETHER}")
    )
    assert isinstance(error, WorkerError)
    assert error.rank == 1
    assert "last words" in str(error)
    assert "of a former cell" not in str(error)
    assert not fresh_session.alive
    with pytest.raises(LaunchError, match="has ended: rank 1 ended with"):
        fresh_session.run("1")


def test_a_task_is_refused_where_the_session_ends_while_it_is_pickled(fresh_session):
    class EndsTheSession:
        def __reduce__(self):
            fresh_session.request_stop("kill")
            until(lambda: fresh_session.done)
            return int, ()

    with pytest.raises(LaunchError, match="has ended"):
        fresh_session.push({"it": EndsTheSession()})
    assert fresh_session.busy == ()


def test_a_rank_that_follows_no_interrupt_ends_the_session(fresh_session):
    cell = fresh_session.run(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('there')\nwhile True: time.sleep(1)"
    )
    reached(cell)
    cell.interrupt()
    error = error_of(cell)
    assert isinstance(error, HangError)
    assert "was to be interrupted" in str(error)
    assert not fresh_session.alive


def test_an_interrupt_of_the_notebook_interrupts_the_cell(session):
    class Pressed(FrontEnd):
        def opened(self, run):
            raise KeyboardInterrupt

    cell = session.run("print('there')\nwhile True: pass", front_end=Pressed())
    reached(cell)
    with pytest.raises(KeyboardInterrupt, match="the session goes on"):
        cell.wait()
    works(session)


@pytest.mark.parametrize("method", ["supervisor", pytest.param("fork", marks=LOSES_SIGNALS)])
def test_closing_leaves_no_process(method, tmp_path, request):
    # as before downloads; the notebook's connections to ranks have none
    request.addfinalizer(lambda: socket.setdefaulttimeout(None))
    socket.setdefaulttimeout(0.1)
    fresh_session = start(tmp_path, start_method=method)
    workers = [psutil.Process(pid) for pid in pids(fresh_session)]
    fresh_session.run("while True: pass")
    fresh_session.close()
    assert not any(entry.is_running() and entry.status() != psutil.STATUS_ZOMBIE for entry in workers)
    assert fresh_session.done
    assert fresh_session.error is None


POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

class Sample:
    def __init__(self, number):
        self.number = number

def square(sample):
    return Sample(sample.number ** 2)

def squares(how):
    context = multiprocessing.get_context(how)
    with context.Pool(1) as pool, ProcessPoolExecutor(1, mp_context=context) as executor:
        found = [*pool.map(square, [Sample(2)]), *executor.map(square, [Sample(3)]), *pool.map(lambda number: Sample(number), [5])]
    return [sample.number for sample in found if type(sample) is Sample]
"""
LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

class Backwards(Sampler):
    def __init__(self, size):
        self.size = size
    def __iter__(self):
        return iter(range(self.size)[::-1])
    def __len__(self):
        return self.size

class Samples(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return Sample(index)

def batches(how):
    loader = DataLoader(
        Samples(), 2, num_workers=1, sampler=Backwards(4), collate_fn=lambda samples: [sample.number + 0.5 for sample in samples],
        worker_init_fn=lambda number: None, multiprocessing_context=how,
    )
    return list(loader)
"""


@pytest.mark.parametrize("how", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow), "fork"])
def test_pools_and_loader_workers_of_any_start_method_find_what_a_cell_defines(session, how):
    found = shown(session, f"{POOL}{LOADER}\nsquares({how!r}), batches({how!r})")
    assert found == ["([4, 9, 5], [[3.5, 2.5], [1.5, 0.5]])"] * 2


def test_what_a_cell_s_function_captures_and_a_new_process_can_t_get_is_named(session):
    text = f"{POOL}\nimport threading\nlock = threading.Lock()\ndef locked():\n    return lock\n"
    call = "multiprocessing.get_context('spawn').Process(target=locked).start()"
    assert "'lock', a _thread.lock, can't be sent" in str(error_of(session.run(f"{text}\n{call}")))


def test_machines_on_each_of_which_it_is_launched_have_no_session() -> None:
    config = resolve({"num_nodes": 2, "master_addr": "10.0.0.1", "cpu": True}, {})
    with pytest.raises(LaunchError, match=r"(?s)num_nodes=2, launched on each of several machines.*hosts=\['a', 'b'\]"):
        Session.start(config)
