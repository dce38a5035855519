"""
The pictures of the panel in the documentation, taken from real runs in JupyterLab: `make pictures`.

`panel.png` is a run in the middle of its training. `hang.gif` is a run of four ranks, one of
which makes a call that the others do not make.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from tests.browser.jlab import Notebook, Server, chromium, opened_in

PICTURES = Path(__file__).parent.parent / "pictures"
WIDTH, HEIGHT = 1100, 900
TALL = 1700
# A person reads at this speed: the seconds of the run between two frames, and those that a frame stays.
BETWEEN, SHOWN = 0.7, 0.5
LAST_SHOWN = 5.0
MOST_FRAMES = 80

MODEL = """
import time, torch
from tqdm.auto import tqdm
from accelerate_nb import Accelerator, notebook_launcher

def parts():
    accelerator = Accelerator(mixed_precision="bf16", step_scheduler_with_optimizer=False)
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=800)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)

def step(accelerator, model, optimizer, scheduler):
    inputs = torch.randn(32, 16)
    loss = (model(inputs) - inputs[:, :4].sum(1, keepdim=True).tanh()).square().mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    return loss.item()
"""
TRAIN = """
def train(epochs=8):
    accelerator, *prepared = parts()
    for epoch in range(epochs):
        bar = tqdm(range(100), desc=f"epoch {epoch + 1} of {epochs}")
        for batch in bar:
            bar.set_postfix(loss=step(accelerator, *prepared))
        accelerator.print(f"epoch {epoch + 1}: learning rate {prepared[2].get_last_lr()[0]:.5f}")

notebook_launcher(train, num_processes=4)
"""
HANG = """
def train():
    accelerator, *prepared = parts()
    for batch in tqdm(range(400), desc="train"):
        loss = step(accelerator, *prepared)
        if batch == 80 and accelerator.is_main_process:
            accelerator.gather(torch.tensor(loss))    # of the main process alone
    return loss

notebook_launcher(train, num_processes=4, hang_warning_after=3)
"""


@contextmanager
def notebooks() -> Iterator[Any]:
    """Opens notebooks in a JupyterLab of its own: gives a function of a name and cells."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        browser = stack.enter_context(chromium())
        server = stack.enter_context(Server(folder, "lab"))
        window = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
        window.set_default_timeout(60_000)

        def open_(name: str, *cells: str) -> Notebook:
            notebook: Notebook = stack.enter_context(opened_in(window, server, name, cells))
            notebook.page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
            return notebook

        yield open_


def take_panel(notebook: Notebook, file: Path) -> None:
    """A picture of a panel after some epochs."""
    notebook.page.set_viewport_size({"width": WIDTH, "height": TALL})
    notebook.start()
    panel = notebook.page.locator(".anb")
    panel.get_by_text("epoch 4 of 8").first.wait_for()
    time.sleep(2)
    panel.screenshot(path=str(file))
    panel.get_by_role("button", name="Stop").click()
    notebook.wait()


def take_hang(notebook: Notebook, file: Path) -> None:
    """A moving picture of a cell that hangs, is explained, and is stopped."""
    frames: list[Image.Image] = []

    def follow(is_over: Callable[[], bool]) -> None:
        while True:
            began = time.monotonic()
            frames.append(Image.open(BytesIO(notebook.page.screenshot())).convert("RGB"))
            if is_over():
                return
            if len(frames) > MOST_FRAMES:
                raise RuntimeError(f"What the picture is to show has not come in {MOST_FRAMES} frames.")
            time.sleep(max(0.0, began + BETWEEN - time.monotonic()))

    def after(seconds: float) -> Callable[[], bool]:
        until = time.monotonic() + seconds
        return lambda: time.monotonic() > until

    notebook.run_cell(0)
    notebook.cell(1).evaluate("(cell) => cell.scrollIntoView({ block: 'start' })")
    follow(lambda: True)
    notebook.page.evaluate("() => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 1 }")
    notebook.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell').then(() => null) }")
    panel = notebook.page.locator(".anb")
    panel.wait_for()
    notebook.cell(1).evaluate("(cell) => cell.scrollIntoView({ block: 'start' })")
    explained, stop = (
        panel.get_by_role("region", name="No output for a while"),
        panel.get_by_role("button", name="Stop"),
    )
    follow(explained.is_visible)
    follow(after(4))
    stop.click()
    follow(after(2))
    if stop.is_visible():
        stop.click()
    follow(after(2))
    _save(frames, file)


def _save(frames: list[Image.Image], file: Path) -> None:
    """Write a GIF whose frames share the colours of all."""
    strip = Image.new("RGB", (WIDTH, 3 * HEIGHT))
    for number, index in enumerate((0, len(frames) // 2, -1)):
        strip.paste(frames[index], (0, number * HEIGHT))
    colours = strip.quantize(96, dither=Image.Dither.NONE)
    first, *others = [frame.quantize(palette=colours, dither=Image.Dither.NONE) for frame in frames]
    durations = [int(SHOWN * 1000)] * (len(frames) - 1) + [int(LAST_SHOWN * 1000)]
    first.save(file, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)


def main() -> None:
    """Take both pictures anew."""
    with notebooks() as open_:
        take_panel(open_("panel.ipynb", MODEL, TRAIN), PICTURES / "panel.png")
        take_hang(open_("hang.ipynb", MODEL, HANG), PICTURES / "hang.gif")
    for file in ("panel.png", "hang.gif"):
        sys.stdout.write(f"{PICTURES / file}: {(PICTURES / file).stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
