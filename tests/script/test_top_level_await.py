"""What is awaited outside of functions runs on one loop, to the end of the script."""

import asyncio

import pytest

from accelerate_nb.script.top_level_await import wait
from tests.processes import python


def test_tasks_of_one_cell_go_on_while_a_later_one_waits():
    async def begins():
        return asyncio.get_running_loop().create_task(asyncio.sleep(0, "done"))

    async def goes_on(task):
        return await task

    assert wait(goes_on(wait(begins()))) == "done"


def test_exceptions_are_the_cells_own():
    async def fails():
        raise KeyError("x")

    with pytest.raises(KeyError):
        wait(fails())


def test_what_still_runs_at_the_end_is_cancelled_without_a_warning():
    program = """
import asyncio
from accelerate_nb.script.top_level_await import wait

async def forever():
    try:
        await asyncio.Event().wait()
    finally:
        print("cancelled")

async def cell():
    global task
    task = asyncio.create_task(forever())
    await asyncio.sleep(0)

wait(cell())
print("the end")
"""
    done = python("-W", "error", "-c", program)
    assert (done.stdout, done.stderr, done.returncode) == ("the end\ncancelled\n", "", 0)
