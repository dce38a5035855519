"""What hangs is told, stopped and cleared away, whoever ends it and whatever it waits in."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.kernel.kernels import Cell, Kernel, gone

# The promises: an interrupt shows in the cell, and a killed kernel leaves nothing, within so many seconds.
INTERRUPTED = 5.0
LEFT = 3.0


def interrupted(cell: Cell) -> float:
    """Interrupt a running cell; the seconds until it has shown so."""
    began = time.monotonic()
    cell.kernel.interrupt()
    cell.wait()
    assert cell.failure.name == "KeyboardInterrupt", cell.text
    return time.monotonic() - began


def assert_launches_and_leaves_nothing(kernel: Kernel) -> None:
    """The next launch works, and of all former ones no process is left."""
    cell = kernel.ok("notebook_launcher(lambda: print('next'), num_processes=2)")
    assert cell.stdout.count("next") == 2
    assert gone(kernel.workers(), within=LEFT) == []
    assert len(kernel.supervisors()) == 1


def test_a_function_can_save_what_it_has_when_it_is_interrupted(kernel: Kernel, tmp_path: Path) -> None:
    cell = kernel.start(f"""
    import os, time
    from pathlib import Path
    def saves(folder):
        print("there", flush=True)
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            Path(folder, os.environ["RANK"]).write_text("saved")
            print("saved", os.environ["RANK"])
            raise
    notebook_launcher(saves, ({str(tmp_path)!r},), num_processes=2)
    """)
    cell.until(lambda: cell.stdout.count("there") == 2)
    assert interrupted(cell) < INTERRUPTED
    assert "KeyboardInterrupt: the run was interrupted" in cell.failure.traceback
    assert "All output: " in cell.failure.traceback
    assert "run.py" not in cell.failure.traceback, "frames of this package"
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["saved", "saved"]
    assert "saved 0" in cell.stdout
    assert "saved 1" in cell.stdout


# Ranks of which one reads data with two workers, all of them waiting for ever.
READING = """
import os, time, torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index > 3:
            print("reading", os.getpid(), flush=True)
            time.sleep(60)
        return index

def reads():
    for batch in DataLoader(Slow(), batch_size=1, num_workers=2):
        pass
"""


def reading(kernel: Kernel, method: str) -> tuple[Cell, list[psutil.Process]]:
    """Start ranks that read data for ever; the cell, and every process that the kernel has then."""
    kernel.ok(READING)
    cell = kernel.start(f"notebook_launcher(reads, num_processes=2, start_method={method!r})")
    cell.until(lambda: cell.stdout.count("reading") == 4)
    processes = kernel.processes()
    pids = {int(line.split()[-1]) for line in cell.stdout.splitlines() if "reading" in line}
    assert pids <= {process.pid for process in processes}
    assert len(processes) >= 6  # two ranks and four workers of their loaders at least
    return cell, processes


@pytest.mark.parametrize("method", ["supervisor", "fork", "spawn"])
def test_a_killed_kernel_leaves_nothing(fresh_kernel: Kernel, method: str) -> None:
    _, processes = reading(fresh_kernel, method)
    fresh_kernel.kill()
    assert gone(processes, within=LEFT) == []
    assert fresh_kernel.processes() == []


def test_a_killed_kernel_leaves_no_program_that_a_rank_started(fresh_kernel: Kernel) -> None:
    cell = fresh_kernel.start("""
    import subprocess, time
    def starts_a_program():
        subprocess.Popen(["sleep", "60"])
        print("started", flush=True)
        time.sleep(60)
    notebook_launcher(starts_a_program, num_processes=2)
    """)
    cell.until(lambda: cell.stdout.count("started") == 2)
    processes = fresh_kernel.processes()
    assert [process.name() for process in processes].count("sleep") == 2
    fresh_kernel.kill()
    assert gone(processes, within=LEFT) == []


def test_a_killed_supervisor_leaves_nothing_and_the_next_launch_works(fresh_kernel: Kernel) -> None:
    cell, processes = reading(fresh_kernel, "supervisor")
    began = time.monotonic()
    os.kill(fresh_kernel.supervisor().pid, signal.SIGKILL)
    cell.wait()
    assert time.monotonic() - began < INTERRUPTED
    assert cell.failure.name == "LaunchError"
    assert "supervisor" in cell.failure.text
    assert gone(processes, within=LEFT) == []
    assert_launches_and_leaves_nothing(fresh_kernel)


def test_a_supervisor_that_was_killed_while_nothing_ran_is_replaced(kernel: Kernel) -> None:
    kernel.ok("notebook_launcher(print, num_processes=2)")
    supervisor = kernel.supervisor()
    # the kernel may not have seen it when it launches
    supervisor.kill()
    assert_launches_and_leaves_nothing(kernel)
    assert kernel.supervisor().pid != supervisor.pid


def test_a_failed_rank_leaves_none_of_its_loader_s_workers(kernel: Kernel) -> None:
    kernel.ok(READING)
    cell = kernel.run("""
    def fails():
        batches = iter(DataLoader(Slow(), batch_size=1, num_workers=2))
        next(batches)
        os.kill(os.getpid(), 9)
    notebook_launcher(fails, num_processes=2)
    """)
    assert cell.error is not None
    assert_launches_and_leaves_nothing(kernel)


def test_a_shut_down_kernel_leaves_nothing(fresh_kernel: Kernel) -> None:
    fresh_kernel.ok("""
    import time
    run = launch(time.sleep, (60,), num_processes=2)
    while run.view.rank(0).state != "running" or run.view.rank(1).state != "running":
        pass
    """)
    processes = fresh_kernel.processes()
    assert len(processes) >= 3
    fresh_kernel.shut_down()
    assert gone(processes, within=LEFT) == []


def test_a_thread_that_a_function_leaves_behind_keeps_nobody_waiting(kernel: Kernel) -> None:
    cell = kernel.ok("""
    import threading, time
    def leaves_a_thread():
        threading.Thread(target=time.sleep, args=(60,)).start()
        return "returned"
    left = notebook_launcher(leaves_a_thread, num_processes=2)
    """)
    assert cell.seconds < INTERRUPTED
    assert_launches_and_leaves_nothing(kernel)
