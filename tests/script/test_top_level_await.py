"""What is awaited outside of functions runs on one loop, to the end of the script."""

from tests.processes import python


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
