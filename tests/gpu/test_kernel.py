"""A real notebook kernel whose cells use the device themselves launches on it, and gets its memory back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from tests.waiting import until

if TYPE_CHECKING:
    from tests.kernel.kernels import Kernel

for needed in ("ipykernel", "jupyter_client", "nbformat"):
    pytest.importorskip(needed, reason=f"a real kernel needs {needed}, which is not installed here")

HELD = 512 << 20
# An interrupt shows in the cell within so many seconds, and what a rank held is free soon after.
INTERRUPTED, FREED = 15.0, 15.0


@pytest.fixture(scope="module")
def notebook(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel in which a cell has used every device, and holds a tensor on each."""
    from tests.kernel.kernels import kernel

    count = torch.cuda.device_count() if device == "cuda" else 2
    every = ",".join(map(str, range(count))) if device == "cuda" else ""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", every) if device == "cuda" else ""
    with kernel(tmp_path_factory.mktemp("notebook"), CUDA_VISIBLE_DEVICES=shown) as running:
        running.ok(f"""
        import os, time, torch
        from accelerate_nb import Accelerator
        ranks, kind = {count}, {device!r}
        held = [torch.ones(1024, device=f"cuda:{{number}}" if kind == "cuda" else "cpu") for number in range(ranks)]

        def free():
            return [torch.cuda.mem_get_info(number)[0] for number in range(ranks)] if kind == "cuda" else []

        def device_and_sum():
            accelerator = Accelerator()
            mine = torch.ones(1, device=accelerator.device)
            return [accelerator.device.type, float(accelerator.reduce(mine, "sum"))]
        """)
        yield running


def assert_launches(notebook: Kernel) -> None:
    """A launch works, and what the notebook holds itself is as it was."""
    notebook.ok("found = notebook_launcher(device_and_sum, num_processes=ranks)")
    assert notebook.value("found == [kind, float(ranks)]"), notebook.value("found")
    assert notebook.value("[one.sum().item() for one in held] == [1024.0] * ranks")


def test_a_launch_works_where_a_cell_has_used_the_device(notebook: Kernel) -> None:
    assert_launches(notebook)
    assert len(notebook.supervisors()) == 1
    # an Accelerator of the notebook's own uses the device, too
    notebook.ok("model = Accelerator(cpu=kind == 'cpu').prepare(torch.nn.Linear(2, 2))")
    assert_launches(notebook)
    assert len(notebook.supervisors()) == 1


def test_an_interrupt_ends_ranks_in_a_kernel_that_does_not_end_and_frees_their_memory(notebook: Kernel) -> None:
    notebook.ok("before = free()")
    count = notebook.value("ranks")
    cell = notebook.start(f"""
    def stuck():
        device = Accelerator().device
        block = torch.ones({HELD}, dtype=torch.uint8, device=device)
        print("there", block.sum().item(), flush=True)
        if device.type == "cuda":
            torch.cuda._sleep(10**12)
            torch.cuda.synchronize()
        else:
            time.sleep(600)
    notebook_launcher(stuck, num_processes=ranks, grace=2.0)
    """)
    cell.until(lambda: cell.stdout.count("there") == count)
    notebook.interrupt()
    cell.wait(INTERRUPTED)
    assert cell.error is not None
    assert cell.error.name == "KeyboardInterrupt", cell.text
    until(lambda: not notebook.workers(), timeout=FREED)
    is_free = f"all(now > then - {HELD} // 4 for now, then in zip(free(), before))"
    until(lambda: notebook.value(is_free), timeout=FREED)
    assert_launches(notebook)
