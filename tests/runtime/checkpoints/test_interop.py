"""A folder that Accelerate wrote loads here, and ours loads there: everything in it, with the same numbers afterwards."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.peers import Peer, under_both
from tests.ranks import ONE_OR_TWO
from tests.runtime.checkpoints.test_checkpoint import Counter
from tests.runtime.loops import samples


class Odd(nn.Module):
    """A model with a weight under two names, one that is not contiguous, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(8, 4).t())
        self.norm = nn.BatchNorm1d(8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(inputs)))) @ self.turned.t()


class Everything:
    """A training with two of each, under either package."""

    def __init__(self, peer: Peer, seed: int, project: str | None = None) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        utils = peer.door("utils")
        options: dict[str, Any] = {}
        if project is not None:
            options["project_config"] = utils.ProjectConfiguration(
                project_dir=project, automatic_checkpoint_naming=True, total_limit=2
            )
        self.accelerator = peer.Accelerator(cpu=True, **options)
        models = [Odd(), nn.Linear(4, 1)]
        optimizers = [torch.optim.AdamW(models[0].parameters()), torch.optim.SGD(models[1].parameters(), 0.1, 0.9)]
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]
        prepared = self.accelerator.prepare(*models, *optimizers, *schedules)
        self.models, self.optimizers, self.schedules = prepared[:2], prepared[2:4], prepared[4:]
        self.customs = Counter(), Counter()
        self.accelerator.register_for_checkpointing(*self.customs)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        with self.accelerator.accumulate(*self.models):
            loss = nn.functional.mse_loss(self.models[1](self.models[0](inputs)), targets)
            self.accelerator.backward(loss)
            for part in (*self.optimizers, *self.schedules):
                part.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        self.customs[1].count += 2
        return float(loss.detach())

    def steps(self) -> list[float]:
        return [self.step(*batch) for batch in DataLoader(samples(12), batch_size=4)]

    def contents(self) -> dict[str, Any]:
        accelerator = self.accelerator
        return {
            "weights": [accelerator.unwrap_model(model).state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedules": [schedule.state_dict()["last_epoch"] for schedule in self.schedules],
            "customs": [custom.count for custom in self.customs],
            "step": accelerator.step,
        }

    def shown(self) -> Any:
        """The state, what is drawn next, and what comes of the next steps."""
        before = copy.deepcopy(self.contents())  # the steps that follow change it
        return before, random.random(), float(np.random.rand()), torch.rand(3), self.steps(), self.contents()


def writes(peer: Peer, folder: str, safe: bool) -> Any:
    training = Everything(peer, seed=1)
    training.steps()
    training.accelerator.save_state(f"{folder}/{peer.name}", safe_serialization=safe)
    training.accelerator.wait_for_everyone()
    return training.shown()


def reads_the_others(peer: Peer, folder: str) -> Any:
    training = Everything(peer, seed=2)
    training.accelerator.load_state(f"{folder}/{'accelerate' if peer.is_ours else 'accelerate_nb'}")
    return training.shown()


@pytest.mark.parametrize(("size", "safe"), [pytest.param(1, True, marks=pytest.mark.slow), (2, True), (2, False)])
def test_everything_goes_on_in_the_other_package(tmp_path: Path, size: int, safe: bool) -> None:
    written = under_both(writes, size, str(tmp_path), safe)
    read = under_both(reads_the_others, size, str(tmp_path))
    for source, target in ((written.ours, read.theirs), (written.theirs, read.ours)):
        for saved, loaded in zip(source, target, strict=True):
            torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    kept = {"checkpoint.json", *(f"positions_{rank}.pkl" for rank in range(size))}
    theirs, ours = ({path.name for path in (tmp_path / name).iterdir()} for name in ("accelerate", "accelerate_nb"))
    assert ours == theirs | kept


def fp16(peer: Peer, folder: str) -> bool:
    """Accelerate scales no gradients on a CPU, so its checkpoint of such a training says nothing of a scaler."""
    accelerator = peer.Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.prepare(nn.Linear(2, 2))
    if not peer.is_ours:
        accelerator.save_state(folder)
        return True
    with pytest.warns(UserWarning, match="scaler starts from its initial state"):
        accelerator.load_state(folder)
    return True


def test_a_scaler_that_accelerate_has_not_saved_begins_anew(tmp_path: Path) -> None:
    assert under_both(fp16, 1, str(tmp_path / "saved")).ours == [True]


def numbers_in_turn(peer: Peer, folder: str) -> Any:
    start = 3 if peer.is_ours else 0
    training = Everything(peer, seed=start, project=folder)
    training.accelerator.project_configuration.iteration = start
    if start:
        training.accelerator.load_state()
    before = copy.deepcopy(training.contents())
    for _ in range(3):
        training.steps()
        training.accelerator.save_state()
    training.accelerator.wait_for_everyone()
    return before, training.contents(), sorted(path.name for path in Path(folder, "checkpoints").iterdir())


@pytest.mark.slow
def test_numbered_checkpoints_are_counted_on_by_the_other_package(tmp_path: Path) -> None:
    folder = str(tmp_path)
    # Accelerate saves 0, 1, 2, then ours finds the newest, goes on with 3, 4, 5, and keeps as many
    both = under_both(numbers_in_turn, 1, folder)
    ((_, theirs, first),) = both.theirs
    ((found, _, second),) = both.ours
    torch.testing.assert_close(found, theirs, rtol=0, atol=0)
    assert first == ["checkpoint_1", "checkpoint_2"]
    assert second == ["checkpoint_4", "checkpoint_5"]
    # and back: what Accelerate finds is what ours saved last
    again = under_both(numbers_the_others_last, 1, folder)
    assert again.theirs == again.ours


def numbers_the_others_last(peer: Peer, folder: str) -> Any:
    training = Everything(peer, seed=8, project=folder)
    training.accelerator.load_state()
    return str(training.contents()["weights"]), training.customs[1].count


def parts(peer: Peer, folder: str) -> Any:
    """The functions of `accelerate.checkpointing`, called one by one."""
    door = peer.door("checkpointing")
    torch.manual_seed(0)
    accelerator = peer.Accelerator(cpu=True)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    mine = Path(folder, peer.name)
    mine.mkdir(exist_ok=True)
    counter = Counter()
    counter.count = 4
    rank = accelerator.process_index
    returned = door.save_accelerator_state(str(mine), [model.state_dict()], [optimizer], [], [], rank, 7)
    door.save_custom_state(counter, str(mine), 1)
    accelerator.wait_for_everyone()
    weights = model.weight.tolist()
    with torch.no_grad():
        model.weight.zero_()
    fresh, again = Counter(), torch.optim.AdamW(model.parameters())
    override = door.load_accelerator_state(str(mine), [model], [again], [], [], rank)
    door.load_custom_state(fresh, str(mine), 1)
    same = model.weight.tolist() == weights
    return returned == mine, override, fresh.count, same, str(again.state_dict())


def test_the_parts_of_a_checkpoint_are_those_of_accelerate(tmp_path: Path) -> None:
    both = under_both(parts, 2, str(tmp_path))
    assert both.ours == both.theirs
    assert both.ours[0][:4] == (True, {"step": 7}, 4, True)


def stateful(peer: Peer) -> tuple[Any, Any]:
    config = peer.door("utils").DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = peer.Accelerator(cpu=True, dataloader_config=config)
    return accelerator, accelerator.prepare(DataLoader(torch.arange(32), batch_size=4), DataLoader(range(8)))[0]


def stops_in_the_middle(peer: Peer, folder: str) -> list[Any]:
    accelerator, loader = stateful(peer)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            accelerator.save_state(f"{folder}/{peer.name}")
    accelerator.wait_for_everyone()
    return seen[2:]


def goes_on_with_the_others(peer: Peer, folder: str) -> list[Any]:
    accelerator, loader = stateful(peer)
    accelerator.load_state(f"{folder}/{'accelerate' if peer.is_ours else 'accelerate_nb'}")
    rest = [batch.tolist() for batch in loader]
    return [rest, len(list(loader))]


@pytest.mark.slow
@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_loaders_of_torchdata_go_on_in_the_other_package(tmp_path: Path, size: int) -> None:
    pytest.importorskip("torchdata")
    written = under_both(stops_in_the_middle, size, str(tmp_path))
    read = under_both(goes_on_with_the_others, size, str(tmp_path))
    whole = 8 // size
    assert read.ours == [[rest, whole] for rest in written.theirs]
    assert [rest for rest, _ in read.theirs] == written.ours
