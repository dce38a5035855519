"""What a training through torch_xla costs: ours, Hugging Face Accelerate's and hand-written code in turns, without a chip."""

import argparse
import os
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.bench import rank_moments
from tests.bench.rows import Row, compared, in_turns, main, timed

STEPS, WIDTH = 20, 64
Epoch = Callable[[], None]


def measure(arguments: argparse.Namespace) -> list[Row]:
    missing = [name for name in ("torch_xla", "accelerate") if find_spec(name) is None]
    if missing:
        print(
            f"{' and '.join(missing)} can't be imported here, so nothing is measured: make bench-tpu does it where they are"
        )
        return []
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="1")
    return [row for name in arguments.only or SECTIONS for row in SECTIONS[name](arguments.rounds)]


def on_device(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a worker whose device is torch_xla's: this process never wakes the runtime."""
    from accelerate_nb import launch

    with tempfile.TemporaryDirectory() as folder:
        return launch(function, arguments, num_processes=1, folder=folder, config_file="", panel="off").wait(590)


def stepping(rounds: int) -> list[Row]:
    """Milliseconds of a training step of a small MLP with AdamW, everything that the device was given having been computed."""
    return compared(on_device(steps_in_turns, rounds), "hand-written", "ms", "a step of an MLP with AdamW: {}")


def steps_in_turns(rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    epochs = {name: way() for name, way in WRITTEN.items()}
    for epoch in epochs.values():
        epoch()  # compiles
    return in_turns({name: partial(step_of, epoch) for name, epoch in epochs.items()}, rounds)


def step_of(epoch: Epoch) -> float:
    """Milliseconds of one step, on average over an epoch."""
    import torch_xla.core.xla_model as xm

    return timed(epoch, before=xm.wait_device_ops, after=xm.wait_device_ops) / STEPS * 1e3


def parts(device: torch.device | None = None) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    # torch puts other weights in the place of those that go to an XLA device, so by hand the optimizer is made after that
    model.to(device)
    samples = 16 * STEPS
    data = TensorDataset(torch.randn(samples, 32), torch.randint(0, 10, (samples,)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
    return model, optimizer, DataLoader(data, batch_size=16), schedule


def hand_written() -> Epoch:
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    device = torch_xla.device()
    model, optimizer, data, schedule = parts(device)
    loader = MpDeviceLoader(data, device)

    def epoch() -> None:
        for inputs, targets in loader:
            nn.functional.cross_entropy(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            xm.optimizer_step(optimizer)
            schedule.step()
            optimizer.zero_grad()

    return epoch


def prepared(accelerator: Any, print_loss: Callable[[torch.Tensor], object] | None = None) -> Epoch:
    assert accelerator.device.type == "xla", accelerator.device
    model, optimizer, loader, schedule = accelerator.prepare(*parts())

    def epoch() -> None:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if print_loss is not None:
                print_loss(loss)

    return epoch


WRITTEN: dict[str, Callable[[], Epoch]] = {
    "hand-written": hand_written,
    "Accelerate": lambda: prepared(import_module("accelerate").Accelerator()),
    "accelerate_nb": lambda: prepared(import_module("accelerate_nb").Accelerator()),
}


def launching(rounds: int) -> list[Row]:
    """From a warm launch's call to the function's first line, and to the first number that its device has computed."""
    # as a notebook that has used it would be; the runtime stays asleep
    from torch_xla.distributed.xla_multiprocessing import spawn

    ways = {
        "xmp.spawn, fork": partial(rank_moments.spawned, spawn, 1, "xla", start_method="fork"),
        "xmp.spawn, spawn": partial(rank_moments.spawned, spawn, 1, "xla", start_method="spawn"),
        "accelerate_nb": partial(rank_moments.launched, "xla", num_processes=1),
    }
    ways["accelerate_nb"]()  # warm from here on
    found = in_turns(ways, rounds)
    rows = []
    for number, what in enumerate(("the first line", "a number that the device computed")):
        taken = {name: [run[number] for run in times] for name, times in found.items()}
        rows += compared(taken, "xmp.spawn, fork", "ms", f"warm launch to {what}: {{}}", 1e3)
    return rows


def printing(rounds: int) -> list[Row]:
    return compared(on_device(prints_in_turns, rounds), "no print", "ms", "a step of ours that tells its loss: {}")


def prints_in_turns(rounds: int) -> dict[str, list[float]]:
    """The times of a step that prints in one way or another; the lines go nowhere, so that only the values cost something."""
    from accelerate_nb import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator()
    printers: dict[str, Callable[[torch.Tensor], object] | None] = {
        "no print": None,
        "print(loss)": print,
        "accelerator.print(loss)": accelerator.print,
        "accelerator.log": lambda loss: accelerator.log({"loss": loss}),
    }
    epochs = {name: prepared(accelerator, print_loss) for name, print_loss in printers.items()}
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        for epoch in epochs.values():
            epoch()  # compiles
            epoch()
        return in_turns({name: partial(step_of, epoch) for name, epoch in epochs.items()}, rounds)


SECTIONS: dict[str, Callable[[int], list[Row]]] = {"step": stepping, "launch": launching, "print": printing}


if __name__ == "__main__":
    only: dict[str, Any] = {"nargs": "+", "choices": list(SECTIONS)}
    main(measure, __doc__, 9, note="one device of torch_xla's CPU backend", only=only)
