"""A worker that fails is told in the cell: which rank, why, and where in the notebook."""

from __future__ import annotations

import pytest

from tests.kernel.kernels import Cell, Kernel

# How soon the ranks that did nothing wrong are ended; the promise is two seconds, the rest is for a busy machine.
SOON = 5.0
METHODS = ["supervisor", "fork", "spawn"]


def raised(cell: Cell) -> str:
    """The text of what a cell raised, whose notebook traceback must be short."""
    assert cell.error is not None, cell.text
    assert len(cell.error.traceback.splitlines()) < 40, cell.error.traceback
    return cell.error.text


@pytest.mark.parametrize("method", METHODS)
def test_the_error_shows_the_lines_of_the_cell_for_every_start_method(kernel: Kernel, method: str) -> None:
    helper = kernel.ok("""
    def look_up(table, key):
        # a comment, so that the line is not the first
        return table[key]
    """)
    cell = kernel.run(f"""
    import os, time
    def fails():
        if os.environ["RANK"] == "1":
            look_up({{}}, "lost")
        time.sleep(60)
    notebook_launcher(fails, num_processes=2, start_method={method!r})
    """)
    text = raised(cell)
    assert cell.error is not None
    assert cell.error.name == "KeyError"
    assert text.startswith("rank 1 stopped with KeyError: 'lost'")
    assert f'Cell In[{cell.number}], line 4, in fails\n    look_up({{}}, "lost")' in text
    assert f"Cell In[{helper.number}], line 3, in look_up\n    return table[key]" in text


@pytest.mark.parametrize("caught", ["KeyError", "LookupError", "WorkerError", "RuntimeError", "ChildFailedError"])
def test_an_exception_is_caught_under_its_own_type_and_as_a_worker_error(kernel: Kernel, caught: str) -> None:
    kernel.ok(f"""
    import os, time
    from accelerate_nb import WorkerError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    def fails():
        if os.environ["RANK"] == "1":
            raise KeyError("lost", 3)
        time.sleep(60)
    try:
        notebook_launcher(fails, num_processes=2)
    except {caught} as error:
        caught = error
    """)
    assert kernel.value("[caught.rank, caught.args]") == [1, ["lost", 3]]
    assert kernel.value("[(one.rank, one.type, one.ended_by_us) for one in caught.failures]") == [
        [0, "KeyboardInterrupt", True],
        [1, "KeyError", False],
    ]


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_class_of_a_cell_is_caught_with_its_attributes(kernel: Kernel, method: str) -> None:
    kernel.ok(f"""
    class DataBroken(Exception):
        def __init__(self, file, line):
            super().__init__(file + " is broken in line " + str(line))
            self.file, self.line = file, line

    def fails():
        raise DataBroken("train.csv", 7)

    try:
        notebook_launcher(fails, num_processes=2, start_method={method!r})
    except DataBroken as error:
        broken = error
    """)
    assert kernel.value("[broken.file, broken.line, len(broken.failures)]") == ["train.csv", 7, 2]
    assert "train.csv is broken in line 7" in kernel.value("str(broken)")


def test_an_error_in_a_chain_shows_what_led_to_it(kernel: Kernel) -> None:
    cell = kernel.run("""
    def fails():
        try:
            {}["first"]
        except KeyError as error:
            raise ValueError("second") from error
    notebook_launcher(fails, num_processes=2)
    """)
    text = raised(cell)
    assert cell.error is not None
    assert cell.error.name == "ValueError"
    assert "stopped with ValueError: second" in text.splitlines()[0]
    assert text.index("\nKeyError: 'first'") < text.index("\nValueError: second")


@pytest.mark.parametrize("method", METHODS)
def test_the_exception_that_a_cell_catches_has_its_causes_with_their_lines(kernel: Kernel, method: str) -> None:
    cell = kernel.ok(f"""
    import traceback
    class ShardBroken(Exception):
        def __init__(self, shard, *, hint):
            super().__init__(shard)
            self.hint = hint

    def fails():
        try:
            try:
                {{}}["first"]
            except KeyError as error:
                raise ShardBroken(3, hint="again") from error
        except ShardBroken:
            raise ValueError("third")

    try:
        notebook_launcher(fails, num_processes=2, start_method={method!r})
    except ValueError as error:
        caught = error
    broken = caught.__context__
    """)
    assert kernel.value("[caught.__cause__, caught.__suppress_context__]") == [None, False]
    assert kernel.value("[type(broken) is ShardBroken, broken.args, broken.hint]") == [True, [3], "again"]
    assert kernel.value("[repr(broken.__cause__), broken.__suppress_context__]") == ["KeyError('first')", True]
    lines = kernel.value(
        "[frame.lineno for link in (broken, broken.__cause__) for frame in traceback.extract_tb(link.__traceback__)]"
    )
    assert lines == [12, 10], cell.text
    assert '{}["first"]' in kernel.value("''.join(traceback.format_exception(broken))")


def test_an_uncaught_error_reports_its_causes_once(kernel: Kernel) -> None:
    cell = kernel.run("""
    def fails():
        try:
            {}["the first"]
        except KeyError as error:
            raise ValueError("the second") from error
    notebook_launcher(fails, num_processes=2)
    """)
    raised(cell)
    assert cell.error is not None
    assert cell.error.traceback.count("KeyError: 'the first'") == 1


def test_a_cause_that_a_cell_raises_again_is_shown_with_its_line(kernel: Kernel) -> None:
    cell = kernel.run("""
    def fails():
        try:
            {}["first"]
        except KeyError as error:
            raise ValueError("second") from error
    try:
        notebook_launcher(fails, num_processes=2)
    except ValueError as error:
        cause = error.__cause__
    raise cause
    """)
    assert cell.error is not None
    assert cell.error.name == "KeyError"
    assert '{}["first"]' in cell.error.traceback
    assert "raise cause" in cell.error.traceback


def test_a_deep_recursion_is_reported_in_few_lines(kernel: Kernel) -> None:
    cell = kernel.run("""
    def deeper(depth):
        return deeper(depth + 1)
    notebook_launcher(deeper, (0,), num_processes=2)
    """)
    assert cell.error is not None
    assert cell.error.name == "RecursionError"
    assert "return deeper(depth + 1)" in raised(cell)


def test_the_others_are_ended_soon_and_what_they_wrote_is_kept(kernel: Kernel) -> None:
    cell = kernel.run("""
    import os, time
    def fails():
        rank = os.environ["RANK"]
        print(f"words of {rank}")
        if rank == "2":
            raise ValueError("no more")
        time.sleep(60)
    run = launch(fails, num_processes=3)
    began = time.monotonic()
    try:
        run.wait()
    finally:
        took = time.monotonic() - began
    """)
    raised(cell)
    assert kernel.value("took") < SOON
    for rank in range(3):
        assert f"words of {rank}\n" in kernel.value(f"run.logs({rank})")
        assert f"[{rank}] words of {rank}\n" in cell.stdout
        assert kernel.value(f"(run.folder / 'rank_{rank}.log').read_text()").startswith(f"words of {rank}\n")


def test_a_rank_that_swallows_every_exception_is_ended_too(kernel: Kernel) -> None:
    cell = kernel.run("""
    import os, time
    def stubborn():
        if os.environ["RANK"] == "1":
            raise ValueError("no more")
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
    notebook_launcher(stubborn, num_processes=2)
    """)
    assert "rank 1 stopped with ValueError: no more" in raised(cell)
    assert cell.seconds < SOON
    assert kernel.workers() == []


@pytest.mark.parametrize("time_", range(3))
def test_the_cause_leads_and_not_the_rank_that_lost_its_connection(kernel: Kernel, time_: int) -> None:
    cell = kernel.run("""
    import torch, torch.distributed as dist
    def fails():
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            raise KeyError("the cause")
        dist.all_reduce(torch.ones(1))
    notebook_launcher(fails, num_processes=2)
    """)
    assert cell.error is not None
    assert cell.error.name == "KeyError"
    assert raised(cell).startswith("rank 1 stopped with KeyError: 'the cause'")
    assert cell.seconds < SOON


def test_the_cause_leads_where_the_failing_rank_closes_its_connections_first(kernel: Kernel) -> None:
    cell = kernel.run("""
    import os, torch, torch.distributed as dist
    def fails():
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            try:
                raise KeyError("the cause")
            finally:
                dist.destroy_process_group()
                os.write(1, b"destroyed\\n")
                import time; time.sleep(0.5)
        dist.all_reduce(torch.ones(1))
    notebook_launcher(fails, num_processes=2)
    """)
    assert cell.error is not None
    assert cell.error.name == "KeyError"
    text = raised(cell)
    assert text.startswith("rank 1 stopped with KeyError")
    assert "rank 0 lost its connection" in text


def test_failures_of_several_ranks_are_all_reported(kernel: Kernel) -> None:
    cell = kernel.run("""
    import os
    def fails():
        rank = os.environ["RANK"]
        raise {"0": KeyError, "1": ValueError, "2": TypeError}[rank](f"reason {rank}")
    try:
        notebook_launcher(fails, num_processes=3)
    except WorkerError as error:
        several = error
        raise
    """)
    text = raised(cell)
    assert kernel.value("[one.type for one in several.failures]") == ["KeyError", "ValueError", "TypeError"]
    for rank, error_name in enumerate(("KeyError", "ValueError", "TypeError")):
        assert f"rank {rank} stopped with {error_name}" in text


def test_a_failure_shows_its_type_to_the_debugger(kernel: Kernel) -> None:
    kernel.run("notebook_launcher(lambda: 1 / 0, num_processes=2)")
    assert kernel.value("__import__('sys').last_type.__name__") == "ZeroDivisionError"


DEATHS = {
    "an exit code": ("os._exit(3)", "rank 1 ended with exit code 3"),
    "a kill": ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 ended with SIGKILL"),
    "a segfault": ("ctypes.string_at(0)", "rank 1 ended with SIGSEGV"),
    "an abort": ("os.abort()", "rank 1 ended with SIGABRT"),
    "a termination": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", "rank 1 ended with SIGTERM"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_process_that_dies_is_reported_with_its_rank_its_code_and_its_last_lines(kernel: Kernel, death: str) -> None:
    code, message = DEATHS[death]
    cell = kernel.run(f"""
    import ctypes, os, signal, time
    def dies():
        if os.environ["RANK"] == "1":
            for step in range(100):
                print("step", step)
            {code}
        time.sleep(60)
    notebook_launcher(dies, num_processes=2)
    """)
    assert cell.error is not None
    assert cell.error.name == "WorkerError"
    text = raised(cell)
    assert text.startswith(message)
    assert "step 99" in text
    assert "rank 0 was ended because of it" in text
    assert cell.seconds < SOON


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_dies_is_reported_for_the_other_start_methods(kernel: Kernel, method: str) -> None:
    cell = kernel.run(f"""
    import os, signal, time
    def dies():
        print("before", os.environ["RANK"], flush=True)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    notebook_launcher(dies, num_processes=2, start_method={method!r})
    """)
    text = raised(cell)
    assert text.startswith("rank 1 ended with SIGKILL")
    assert "before 1" in text


def test_a_rank_that_dies_in_a_collective_leads(kernel: Kernel) -> None:
    cell = kernel.run("""
    import os, torch, torch.distributed as dist
    def dies():
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            print("last words", flush=True)
            os._exit(9)
        dist.all_reduce(torch.ones(1))
    notebook_launcher(dies, num_processes=2)
    """)
    text = raised(cell)
    assert text.startswith("rank 1 ended with exit code 9")
    assert "last words" in text


def test_a_memory_limit_is_reported_where_it_was_met(kernel: Kernel) -> None:
    cell = kernel.run("""
    import os, resource, time
    def grows():
        if os.environ["RANK"] == "1":
            size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20),) * 2)
            print("growing")
            held = []
            while True:
                held.append(bytearray(64 << 20))
        time.sleep(60)
    notebook_launcher(grows, num_processes=2)
    """)
    assert cell.error is not None
    assert cell.error.name == "MemoryError"
    text = raised(cell)
    assert text.startswith("rank 1 stopped with MemoryError")
    assert "held.append(bytearray(64 << 20))" in text


def test_a_memory_limit_of_torch_is_reported_where_it_was_met(kernel: Kernel) -> None:
    cell = kernel.run("""
    import os, resource, time, torch
    def grows():
        if os.environ["RANK"] == "1":
            size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + (128 << 20),) * 2)
            held = [torch.ones(16 << 20) for _ in range(8)]
        time.sleep(60)
    notebook_launcher(grows, num_processes=2)
    """)
    text = raised(cell)
    assert text.startswith("rank 1 stopped with RuntimeError")
    assert "allocate" in text
    assert "held = [torch.ones" in text


def test_an_exception_that_cannot_be_pickled_is_reported_all_the_same(kernel: Kernel) -> None:
    cell = kernel.run("""
    import threading
    class Locked(Exception):
        def __init__(self):
            super().__init__("it is locked")
            self.lock = threading.Lock()
    def fails():
        raise Locked
    notebook_launcher(fails, num_processes=2)
    """)
    text = raised(cell)
    assert "stopped with Locked: it is locked" in text.splitlines()[0]
    assert f"Cell In[{cell.number}], line 7, in fails" in text


def test_a_result_that_cannot_be_pickled_is_none_and_named_in_the_cell(kernel: Kernel) -> None:
    cell = kernel.ok("""
    import threading
    def brings_a_lock():
        return {"loss": 1.0, "lock": threading.Lock()}
    print(notebook_launcher(brings_a_lock, num_processes=2))
    """)
    assert cell.stdout.endswith("None\n")
    assert cell.stderr.count("result['lock'] is a lock") == 1


def test_sys_exit_in_a_worker_is_reported_or_is_a_return(kernel: Kernel) -> None:
    kernel.ok("import sys\nnotebook_launcher(lambda: sys.exit(), num_processes=2)")
    cell = kernel.run("notebook_launcher(lambda: sys.exit(4), num_processes=2)")
    # an exception of the kind SystemExit would end a notebook's cell without a word
    assert cell.error is not None
    assert "stopped with SystemExit: 4" in raised(cell)


def test_a_cell_after_a_failed_launch_is_not_run_by_run_all(kernel: Kernel) -> None:
    cell = kernel.start("notebook_launcher(lambda: 1 / 0, num_processes=2)")
    cell.wait()
    assert cell.error is not None
    assert "ZeroDivisionError" in cell.error.name
