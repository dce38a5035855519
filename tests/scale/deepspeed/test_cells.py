"""In a cell of a notebook DeepSpeed says nothing of its own, and a rank that fails, hangs or is stopped is told as elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.kernel.kernels import Cell, Error, Kernel, gone, kernel as started
from tests.kernel.test_hangs import INTERRUPTED

TRAINS = """
    import os, time, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from accelerate_nb import Accelerator, launch

    def train(happens):
        accelerator = Accelerator()
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        loader = DataLoader(TensorDataset(torch.randn(16, 8), torch.randn(16, 1)), 4)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.is_last_process:
                happens()
            optimizer.step()
        return loss.item()

    def run(happens=int, **settings):
        global started
        started = launch(
            train, (happens,), num_processes=2, cpu=True, strategy="deepspeed", deepspeed_config={"zero_stage": 3}, **settings
        )
        return started.wait()

    def dies():
        os.kill(os.getpid(), 9)

    def raises():
        raise ValueError("enough")

    def hangs():
        print("the last words", flush=True)
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel with the training."""
    with started(tmp_path_factory.mktemp("kernel")) as running:
        running.ok(dedent(TRAINS))
        yield running


def error_of(cell: Cell) -> Error:
    assert cell.error is not None, cell.text
    return cell.error


def test_a_cell_shows_its_value_and_nothing_of_deepspeed(kernel: Kernel) -> None:
    cell = kernel.ok("run()")
    assert (cell.stdout, cell.stderr) == ("", "")
    assert float(cell.text) > 0
    assert kernel.value("[started.logs(0), started.logs(1)]") == ["", ""]


@pytest.mark.parametrize(
    ("happens", "message"),
    [("raises", "rank 1 stopped with ValueError: enough"), ("dies", "rank 1 ended with SIGKILL")],
)
def test_a_rank_that_fails_is_named(kernel: Kernel, happens: str, message: str) -> None:
    error = error_of(kernel.run(f"run({happens})"))
    assert error.text.startswith(message)
    # the other one waits for it in a collective of the engine, and is not to blame
    assert "rank 0 " in error.text


def test_a_hang_is_reported_with_the_stack_of_every_rank_and_an_interrupt_ends_it(kernel: Kernel) -> None:
    cell = kernel.start("run(hangs, hang_warning_after=2)")
    # a busy machine may be silent for as long before the training begins, which is reported, too
    cell.until(lambda: "time.sleep(600)" in cell.text)
    assert "rank 1 is elsewhere" in cell.text
    assert "rank 0 waits in" in cell.text
    kernel.interrupt()
    cell.wait(INTERRUPTED)
    assert error_of(cell).name == "KeyboardInterrupt"
    assert gone(kernel.workers(), within=INTERRUPTED) == []
