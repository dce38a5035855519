"""Cells of the notebooks that are tested in a browser."""

# A training that a person would watch: a bar, a metric, lines and real steps on each rank.
TRAIN = """
import time
import torch
from tqdm.auto import tqdm
from accelerate_nb import Accelerator, launch, notebook_launcher

def train(steps=100_000):
    accelerator = Accelerator()
    accelerator.init_trackers("demo")
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in tqdm(range(steps), desc="steps"):
        loss = model(torch.ones(4, 2)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
        print("step", step, flush=True)
        time.sleep(0.1)
        if accelerator.stop_requested:
            return f"stopped after {step} steps"
    return f"made all {steps} steps"
"""
RUN = "print('it', notebook_launcher(train, num_processes=2, cpu=True))"
SHORT = "print('it', notebook_launcher(train, (20,), num_processes=2, cpu=True))"
ALIVE = "print('the kernel is', 'alive')"
