"""A script for Hugging Face Accelerate gives the same numbers here: with its import changed, and as it is."""

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from tests.processes import TORCHRUN, python

SCRIPT = """
    import argparse
    import json

    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader, TensorDataset

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float, default=0.1)
        parser.add_argument("--output", required=True)
        options = parser.parse_args()

        accelerator = Accelerator(gradient_accumulation_steps=2)
        set_seed(3)
        inputs = torch.randn(70, 4)
        data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        train = DataLoader(data, batch_size=8, shuffle=True)
        test = DataLoader(data, batch_size=8)
        model, optimizer, schedule, train, test = accelerator.prepare(model, optimizer, schedule, train, test)

        losses = []
        for epoch in range(2):
            model.train()
            for batch, labels in train:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.cross_entropy(model(batch), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach().reshape(1)).tolist())
        model.eval()
        guesses = []
        for batch, _ in test:
            with torch.no_grad():
                guesses += accelerator.gather_for_metrics(model(batch).argmax(1)).tolist()
        if accelerator.is_main_process:
            weights = {name: value.tolist() for name, value in accelerator.unwrap_model(model).state_dict().items()}
            found = [losses, guesses, weights, schedule.get_last_lr(), accelerator.num_processes]
            with open(options.output, "w") as file:
                json.dump(found, file)
        accelerator.end_training()

    if __name__ == "__main__":
        main()
"""
CHANGED = SCRIPT.replace("from accelerate", "from accelerate_nb")
OURS = ("-m", "accelerate_nb", "launch", "--cpu", "--num_processes", "2")
WAYS = {
    "changed, accelerate-nb launch": (CHANGED, OURS),
    "changed, torchrun": (CHANGED, TORCHRUN),
    "as it is, accelerate-nb launch": (SCRIPT, OURS),
}


def numbers(source: str, launcher: tuple[str, ...], folder: Path) -> Any:
    """What the script found on two processes."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(dedent(source), encoding="utf-8")
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HOME": str(folder)}
    words = (*launcher, "train.py", "--lr", "0.05", "--output", "found.json")
    done = python(*words, folder=folder, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the script finds with Accelerate itself; `accelerate launch --cpu` starts one process only, so torchrun starts it."""
    # now and then one of its processes aborts while Python ends ("terminate called without an active exception")
    script = SCRIPT + "\n        import os\n        os._exit(0)\n"
    return numbers(script, TORCHRUN, tmp_path_factory.mktemp("theirs"))


@pytest.mark.parametrize("way", WAYS)
def test_a_script_for_accelerate_finds_the_same(way: str, theirs: Any, tmp_path: Path) -> None:
    losses, guesses, weights, rates, processes = numbers(*WAYS[way], tmp_path)
    assert processes == theirs[4] == 2
    assert rates == theirs[3]
    assert len(guesses) == 70
    assert guesses == theirs[1]
    assert torch.tensor(losses).allclose(torch.tensor(theirs[0]), rtol=1e-5)
    assert list(weights) == list(theirs[2])
    for name, value in weights.items():
        assert torch.tensor(value).allclose(torch.tensor(theirs[2][name]), rtol=1e-4, atol=1e-6)
