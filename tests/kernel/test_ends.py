"""How a run that did not end by itself is told of: in the words of the notebook, with the states that its ranks have."""

import psutil

from tests.kernel.kernels import Cell, Kernel

WAITS = """
from accelerate_nb import notebook_launcher
def waits():
    import signal, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("here", flush=True)
    time.sleep(600)
notebook_launcher(waits, num_processes=2, cpu=True, panel="widget", stop_grace_period=0.5)
"""


def begun(kernel: Kernel) -> Cell:
    cell = kernel.start(WAITS)
    cell.until(lambda: "here" in drawn(cell))
    return cell


def drawn(cell: Cell) -> str:
    """The run as the cell shows it, where no page draws its panel."""
    return "".join(output.data["text/plain"] for output in cell.outputs if output.output_type == "display_data")


def test_an_interrupt_shows_no_frames_of_this_package_and_ranks_that_were_stopped(fresh_kernel: Kernel) -> None:
    cell = begun(fresh_kernel)
    fresh_kernel.interrupt()
    cell.wait()
    assert "KeyboardInterrupt: the run was interrupted" in cell.failure.traceback
    assert "All output: " in cell.failure.traceback
    assert "run.py" not in cell.failure.traceback
    assert "stopped" in drawn(cell)
    assert "failed" not in drawn(cell)


def test_where_the_workers_are_lost_no_rank_is_at_fault_and_none_runs(fresh_kernel: Kernel) -> None:
    cell = begun(fresh_kernel)
    psutil.Process(fresh_kernel.supervisor().pid).kill()
    cell.wait()
    assert "LaunchError: The workers were lost" in cell.failure.traceback
    assert "the workers were lost: the supervisor" in drawn(cell)
    assert "running" not in drawn(cell)
    assert "SIGKILL" not in drawn(cell)
