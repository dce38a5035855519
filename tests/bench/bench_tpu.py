"""What a training through torch_xla costs: ours, Hugging Face Accelerate's and hand-written code in turns, without a chip."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.bench.rows import Row, compared, in_turns, print_rows, read_arguments, timed

STEPS, ACCUMULATION = 20, 4
Epoch = Callable[[], None]


def main() -> None:
    """Measure what was asked for, and print what was found."""
    wanted: dict[str, Callable[[int], list[Row]]] = {
        "step": stepping,
        "programs": compiling,
        "launch": launching,
        "print": printing,
    }
    arguments = read_arguments(__doc__, rounds=9, only={"nargs": "+", "choices": list(wanted)})
    missing = [name for name in ("torch_xla", "accelerate") if find_spec(name) is None]
    if missing:
        print(
            f"{' and '.join(missing)} can't be imported here, so nothing is measured: make bench-tpu does it where they are"
        )
        return
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    load = os.getloadavg()[0]
    rows = [row for name in arguments.only or wanted for row in wanted[name](arguments.rounds)]
    print_rows(rows, load, as_json=arguments.json, about="one device of torch_xla's CPU backend")


def on_device(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a worker whose device is torch_xla's: this process never wakes the runtime."""
    from accelerate_nb import launch

    with tempfile.TemporaryDirectory() as folder:
        return launch(function, arguments, num_processes=1, folder=folder, config_file="", panel="off").wait(590)


# ---------------------------------------------------------------------------------------------------------------- step


def stepping(rounds: int) -> list[Row]:
    """Milliseconds of a training step of a small MLP with AdamW, everything that the device was given having been computed."""
    return compared(on_device(steps_in_turns, rounds), "hand-written", "ms", "a step of an MLP with AdamW: {}")


def steps_in_turns(rounds: int) -> dict[str, list[float]]:
    """The times of each way's step, in this process."""
    torch.set_num_threads(1)
    epochs = {name: way(1, 64) for name, way in WRITTEN.items()}
    for epoch in epochs.values():
        epoch()  # compiles
    return in_turns({name: partial(step_of, epoch) for name, epoch in epochs.items()}, rounds)


def step_of(epoch: Epoch) -> float:
    """Milliseconds of one step, on average over an epoch."""
    import torch_xla.core.xla_model as xm

    return timed(epoch, before=xm.wait_device_ops, after=xm.wait_device_ops) / STEPS * 1e3


def parts(
    accumulation: int, width: int, device: torch.device | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    """A small model and its data, for as many steps as are measured."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    # torch puts other weights in the place of those that go to an XLA device, so by hand the optimizer is made after that
    model.to(device)
    samples = 16 * STEPS * accumulation
    data = TensorDataset(torch.randn(samples, 32), torch.randint(0, 10, (samples,)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
    return model, optimizer, DataLoader(data, batch_size=16), schedule


def hand_written(accumulation: int, width: int) -> Epoch:
    """The loop as one writes it with nothing but torch_xla."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    device = torch_xla.device()
    model, optimizer, data, schedule = parts(accumulation, width, device)
    loader = MpDeviceLoader(data, device)

    def epoch() -> None:
        for number, (inputs, targets) in enumerate(loader, start=1):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            (loss / accumulation).backward()
            if number % accumulation == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                xm.optimizer_step(optimizer)
                schedule.step()
                optimizer.zero_grad()

    return epoch


def ours(accumulation: int, width: int) -> Epoch:
    """The loop with this package."""
    from accelerate_nb import Accelerator

    return prepared(Accelerator(gradient_accumulation_steps=accumulation), accumulation, width)


def hugging_face(accumulation: int, width: int) -> Epoch:
    """The loop with Hugging Face Accelerate."""
    from accelerate import Accelerator

    return prepared(Accelerator(gradient_accumulation_steps=accumulation), accumulation, width)


def prepared(
    accelerator: Any, accumulation: int, width: int, print_loss: Callable[[torch.Tensor], object] | None = None
) -> Epoch:
    """The loop that both know."""
    assert accelerator.device.type == "xla", accelerator.device
    model, optimizer, loader, schedule = accelerator.prepare(*parts(accumulation, width))

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


WRITTEN: dict[str, Callable[[int, int], Epoch]] = {
    "hand-written": hand_written,
    "Accelerate": hugging_face,
    "accelerate_nb": ours,
}


# ------------------------------------------------------------------------------------------------------------ programs


def compiling(rounds: int) -> list[Row]:
    """Programs compiled, and seconds taken, in 20 steps that accumulate 4 gradients each; each way in a process of its own."""
    found = {name: on_device(programs_of, name) for name in WRITTEN}
    what = f"{STEPS} steps with accumulation {ACCUMULATION}"
    hand = found["hand-written"]
    rows = []
    for name, (count, seconds) in found.items():
        beside = "" if name == "hand-written" else "hand-written"
        rows.append(Row(f"{what}, programs compiled: {name}", count, "", count / hand[0] if beside else None, beside))
        rows.append(Row(f"{what}, compiling: {name}", seconds, "s", seconds / hand[1] if beside else None, beside))
    return rows


def programs_of(name: str) -> tuple[int, float]:
    """How many programs one way's steps take, and how long their compilation."""
    from torch_xla.debug import metrics

    epoch = WRITTEN[name](ACCUMULATION, 64)
    before = metrics.metric_data("CompileTime") or (0, 0.0)
    step_of(epoch)
    metric = metrics.metric_data("CompileTime")
    assert metric is not None
    return metric[0] - before[0], (metric[1] - before[1]) / 1e9


# -------------------------------------------------------------------------------------------------------------- launch


def launching(rounds: int) -> list[Row]:
    """From a warm launch's call to the function's first line, and to the first number that its device has computed."""
    import torch_xla  # noqa: F401 - as a notebook that has used it would be; the runtime stays asleep

    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "xmp.spawn, fork": partial(torch_xla_s, "fork"),
        "xmp.spawn, spawn": partial(torch_xla_s, "spawn"),
        "accelerate_nb": own_launch,
    }
    own_launch()  # warm from here on
    found = in_turns(ways, rounds)
    rows = []
    for number, what in enumerate(("the first line", "a number that the device computed")):
        taken = {name: [run[number] for run in times] for name, times in found.items()}
        rows += compared(taken, "xmp.spawn, fork", "ms", f"warm launch to {what}: {{}}", 1e3)
    return rows


def first_moments() -> tuple[float, float]:
    """The whole work of a rank: when it began, and when its device had computed something."""
    begun = time.time()
    import torch_xla

    number = float((torch.ones(2, device=torch_xla.device()) + 1).sum().cpu())
    assert number == 4
    return begun, time.time()


def note_moments(index: int, folder: str) -> None:
    """The same for a launcher that returns nothing."""
    Path(folder, str(index)).write_text(json.dumps(first_moments()))


def own_launch() -> tuple[float, float]:
    """Seconds of one launch of ours."""
    begin = time.time()
    begun, done = on_device(first_moments)
    return begun - begin, done - begin


def torch_xla_s(method: str) -> tuple[float, float]:
    """Seconds of one launch of torch_xla's own."""
    from torch_xla.distributed import xla_multiprocessing as xmp

    with tempfile.TemporaryDirectory() as folder:
        begin = time.time()
        xmp.spawn(note_moments, args=(folder,), start_method=method)
        begun, done = json.loads(Path(folder, "0").read_text())
    return begun - begin, done - begin


# --------------------------------------------------------------------------------------------------------------- print


def printing(rounds: int) -> list[Row]:
    """What it costs to print the loss in every step."""
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
    epochs = {name: prepared(accelerator, 1, 64, print_loss) for name, print_loss in printers.items()}
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        for epoch in epochs.values():
            epoch()  # compiles
            epoch()
        return in_turns({name: partial(step_of, epoch) for name, epoch in epochs.items()}, rounds)


if __name__ == "__main__":
    main()
