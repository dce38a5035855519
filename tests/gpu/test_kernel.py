"""A real notebook kernel whose cells use the device themselves launches on it, and gets its memory back."""

import os
from pathlib import Path

import pytest
import torch

from tests.waiting import until

for needed in ("ipykernel", "jupyter_client", "nbformat"):
    pytest.importorskip(needed, reason=f"a real kernel needs {needed}, which is not installed here")

HELD = 512 << 20
SOON = 15.0  # seconds until an interrupt shows in the cell, and until what a rank held is free
LAUNCHED = "[notebook_launcher(device_and_sum, num_processes=ranks), [one.sum().item() for one in held]]"


def test_cells_that_use_the_device_launch_on_it_and_an_interrupt_frees_it(device: str, tmp_path: Path) -> None:
    from tests.kernel.kernels import kernel

    ranks = torch.cuda.device_count() if device == "cuda" else 2
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks)))) if device == "cuda" else ""
    launched = [[device, float(ranks)], [1024.0] * ranks]
    with kernel(tmp_path, CUDA_VISIBLE_DEVICES=shown) as notebook:
        notebook.ok(f"""
        import os, time, torch
        from accelerate_nb import Accelerator
        ranks, kind = {ranks}, {device!r}
        held = [torch.ones(1024, device=f"cuda:{{number}}" if kind == "cuda" else "cpu") for number in range(ranks)]

        def free():
            return [torch.cuda.mem_get_info(number)[0] for number in range(ranks)] if kind == "cuda" else []

        def device_and_sum():
            accelerator = Accelerator()
            mine = torch.ones(1, device=accelerator.device)
            return [accelerator.device.type, float(accelerator.reduce(mine, "sum"))]

        def stuck():
            device = Accelerator().device
            block = torch.ones({HELD}, dtype=torch.uint8, device=device)
            print("there", block.sum().item(), flush=True)
            if device.type == "cuda":
                torch.cuda._sleep(10**12)
                torch.cuda.synchronize()
            else:
                time.sleep(600)
        """)
        assert notebook.value(LAUNCHED) == launched
        # an Accelerator of the notebook's own uses the device, too
        notebook.ok("model = Accelerator(cpu=kind == 'cpu').prepare(torch.nn.Linear(2, 2))")
        assert notebook.value(LAUNCHED) == launched
        assert len(notebook.supervisors()) == 1
        notebook.ok("before = free()")
        cell = notebook.start("notebook_launcher(stuck, num_processes=ranks, grace=2.0)")
        cell.until(lambda: cell.stdout.count("there") == ranks)
        notebook.interrupt()
        cell.wait(SOON)
        assert cell.failure.name == "KeyboardInterrupt", cell.text
        until(lambda: not notebook.workers(), timeout=SOON)
        until(
            lambda: notebook.value(f"all(now > then - {HELD} // 4 for now, then in zip(free(), before))"), timeout=SOON
        )
        assert notebook.value(LAUNCHED) == launched
