"""Gradients are gathered over micro-steps as Accelerate gathers them, and right where it is not."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.runtime.training.accumulation import AccumulationWindows
from accelerate_nb.utils.dataclasses import GradientAccumulationPlugin
from tests.peers import Peer, under_both
from tests.ranks import ONE_OR_TWO, run_on_ranks
from tests.runtime.loops import Streamed, net, samples


def flat(tensors: Any) -> list[float]:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist()


class Training:
    """A model that is trained one micro-step after the other."""

    def __init__(self, accelerator: Any, *loaders: Any, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.accelerator = accelerator
        self.bare = net()
        optimizer = torch.optim.SGD(self.bare.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer, *self.loaders = accelerator.prepare(self.bare, optimizer, *loaders)
        self.synced: list[bool] = []
        self.losses: list[float] = []
        self.gradients: list[list[float]] = []

    def micro_step(self, batch: Any) -> None:
        inputs, targets = batch
        with self.accelerator.accumulate(self.model):
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            self.accelerator.backward(loss)
            self.gradients.append(flat(parameter.grad for parameter in self.bare.parameters()))
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.synced.append(self.accelerator.sync_gradients)
        self.losses.append(loss.item())

    def end(self) -> list[Any]:
        """Each micro-step's flag, loss and gradients, and the weights at last."""
        return [self.synced, self.losses, self.gradients, flat(self.bare.parameters())]


def loader(count: int = 22, batch: int = 4) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=batch)


def one_after_the_other(training: Training) -> None:
    for _ in range(2):
        for loader in training.loaders:
            for batch in loader:
                training.micro_step(batch)


def side_by_side(training: Training) -> None:
    first, second = training.loaders
    for first_batch, second_batch in zip(first, second, strict=False):
        training.micro_step(first_batch)
        training.micro_step(second_batch)


def nested(training: Training) -> None:
    for batch in training.loaders[0]:
        training.micro_step(batch)
        for inputs, _ in training.loaders[1]:
            with torch.no_grad():
                training.accelerator.gather_for_metrics(training.model(inputs))
        training.micro_step(batch)


def by_command(training: Training) -> None:
    """The flag is set by hand, and gradients are held and sent by hand."""
    accelerator, model = training.accelerator, training.model
    for number, (inputs, targets) in enumerate(training.loaders[0]):
        accelerator.sync_gradients = number % 3 == 2
        with accelerator.no_sync(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            if not accelerator.sync_gradients:
                accelerator.backward(loss)
        if accelerator.sync_gradients:
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), 0.1)
        training.gradients.append(flat(parameter.grad for parameter in training.bare.parameters()))
        training.optimizer.step()
        training.optimizer.zero_grad()


PLAINLY: list[tuple[Callable[[Training], None], dict[str, Any], Callable[[], tuple[Any, ...]]]] = [
    (one_after_the_other, {"num_steps": 4}, lambda: (loader(), loader(9))),
    (one_after_the_other, {"num_steps": 2, "sync_each_batch": True}, lambda: (loader(), loader(13))),
    (one_after_the_other, {"num_steps": 3, "sync_with_dataloader": False}, lambda: (loader(), loader(13))),
    (one_after_the_other, {"num_steps": 3}, lambda: (DataLoader(Streamed(21), batch_size=4),)),
    (side_by_side, {"num_steps": 3}, lambda: (loader(40), loader(24))),
    (nested, {"num_steps": 4}, lambda: (loader(), loader(9))),
    (by_command, {"num_steps": 2}, lambda: (loader(24),)),
]


def run(peer: Peer) -> list[Any]:
    found = []
    for scenario, options, loaders in PLAINLY:
        plugin = peer.door("utils").GradientAccumulationPlugin(**options)
        accelerator = peer.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        training = Training(accelerator, *loaders())
        scenario(training)
        found.append(training.end())
        peer.door("state").GradientState._reset_state()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_windows_are_accelerates(size: int) -> None:
    both = under_both(run, size)
    for ours, theirs in zip(both.ours, both.theirs, strict=True):
        for (scenario, options, _), our, their in zip(PLAINLY, ours, theirs, strict=True):
            assert our == their, (scenario.__name__, options)


def averaged(count: int, steps: int, kind: str) -> list[Any]:
    plugin = GradientAccumulationPlugin(num_steps=steps, average_over_window=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    data = Streamed(count) if kind == "iterable" else samples(count)
    training = Training(accelerator, DataLoader(data, batch_size=4))
    one_after_the_other(training)
    return training.end()


def averaged_by_hand(count: int, steps: int) -> list[Any]:
    torch.manual_seed(0)
    accelerator = Accelerator()  # connects the processes; the rest is PyTorch's
    rank, size = accelerator.process_index, accelerator.num_processes
    bare = net()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9)
    model: nn.Module = bare if size == 1 else DistributedDataParallel(bare)
    data = samples(count)
    batches = [data[start : start + 4] for start in range(0, count, 4)][rank::size]
    found: list[list[Any]] = [[], [], []]
    for _ in range(2):
        for begin in range(0, len(batches), steps):
            window = batches[begin : begin + steps]
            for number, (inputs, targets) in enumerate(window, 1):
                last = number == len(window)
                with nullcontext() if last or size == 1 else model.no_sync():
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    (loss / len(window)).backward()
                gradients = flat(parameter.grad for parameter in bare.parameters())
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
                for values, value in zip(found, (last, loss.item(), gradients), strict=True):
                    values.append(value)
    return [*found, flat(bare.parameters())]


@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_a_short_window_is_divided_by_its_own_length_also_where_nobody_knew_that_it_would_be_short(size: int) -> None:
    expected = run_on_ranks(averaged_by_hand, size, 40, 4)
    assert run_on_ranks(averaged, size, 40, 4, "indexed") == expected
    for ours, by_hand in zip(run_on_ranks(averaged, size, 40, 4, "iterable"), expected, strict=True):
        assert ours[0] == by_hand[0]
        assert ours[1] == pytest.approx(by_hand[1], abs=1e-5)
        assert ours[3] == pytest.approx(by_hand[3], abs=1e-5)


def two_models(steps: int) -> list[Any]:
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    first, second = Training(accelerator, loader(40), seed=0), Training(accelerator, seed=1)
    for batch in first.loaders[0]:
        second.micro_step(batch)
        first.micro_step(batch)
    return [first.end(), second.end()]


def models_alone(steps: int) -> list[Any]:
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    trainings = [Training(accelerator, loader(40), seed=seed) for seed in (0, 1)]
    for training in trainings:
        for batch in training.loaders[0]:
            training.micro_step(batch)
    return [training.end() for training in trainings]


@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_two_models_that_take_turns_both_step(size: int) -> None:
    for steps in (2, 3):
        together, alone = run_on_ranks(two_models, size, steps), run_on_ranks(models_alone, size, steps)
        batches = 10 // size
        expected = [number % steps == 0 or number == batches for number in range(1, batches + 1)]
        assert together == alone
        for first, second in together:
            assert first[0] == second[0] == expected


def test_models_of_one_block_are_counted_together_and_a_checkpoints_count_is_that_of_every_group() -> None:
    windows, models = AccumulationWindows(), (nn.Linear(1, 1), nn.Linear(1, 1))
    assert windows.of(models) is windows.of(models)
    assert windows.of(models) is not windows.of(models[:1])
    windows.of(models).advance(3, at_end=False)
    windows.of(models[1:])
    assert windows.of(models).count == 1
    windows = AccumulationWindows(2)
    assert [windows.of(group).count for group in ((), (nn.Linear(1, 1),))] == [2, 2]


def in_new_containers() -> list[list[list[bool]]]:
    """For each container of two models: of each block, whether it ends a window, and whether each model exchanges gradients."""
    found = []
    for container in (list, tuple, nn.ModuleList, lambda models: [nn.ModuleDict({"first": models[0]}), models[1]]):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        models = accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1))
        flags = []
        for block in [container(models) for _ in range(4)]:
            with accelerator.accumulate(block):
                flags.append([accelerator.sync_gradients, *(model.require_backward_grad_sync for model in models)])
        found.append(flags)
    return found


def test_models_in_a_container_that_is_made_for_each_block_are_one_group() -> None:
    for found in run_on_ranks(in_new_containers, 2):
        assert found == [[[False] * 3, [True] * 3] * 2] * 4


def test_what_is_no_model_goes_on_with_the_window_and_a_model_that_is_gone_leaves_none_to_the_next() -> None:
    windows = AccumulationWindows()
    for _ in range(4):
        model = nn.Linear(1, 1)
        windows.of((model,)).advance(3, at_end=False)
        assert windows.of(({"model": model},)).count == windows.of((model,)).count == 1
        del model
    assert not windows._others


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_blocks_of_a_step_can_decorate_a_function_as_accelerates_can(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))

    @accelerator.accumulate(model)
    @accelerator.autocast()
    def micro_step() -> list[Any]:
        return [accelerator.sync_gradients, torch.is_autocast_enabled("cpu")]

    assert [micro_step() for _ in range(4)] == [[False, precision == "bf16"], [True, precision == "bf16"]] * 2
    for block in (accelerator.no_sync(model), accelerator.trigger_sync_in_backward(model)):
        assert block(lambda: "called")() == "called"


def left_early() -> list[Any]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    training = Training(accelerator, loader(40), loader(12))
    for batch in training.loaders[0]:
        training.micro_step(batch)
        for number, _ in enumerate(training.loaders[1], 1):
            if number == len(training.loaders[1]):
                break  # at the last batch, where a flag could be left behind
    for number, batch in enumerate(training.loaders[0]):
        training.micro_step(batch)
        if number == 2:
            break  # inside of a window
    seen = [training.synced, accelerator.gradient_state.in_dataloader, accelerator.step]
    for begin_anew in (accelerator.free_memory, Accelerator):
        accelerator.gradient_state.sync_gradients = False
        begin_anew()
        seen.append(accelerator.sync_gradients)
    return seen


@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_a_loader_that_is_left_early_leaves_nothing_behind(size: int) -> None:
    batches = 10 // size
    whole = [number % 2 == 0 or number == batches for number in range(1, batches + 1)]
    for synced, *others in run_on_ranks(left_early, size):
        assert synced == [*whole, False, True, False]
        assert others == [False, 3, True, True]


def taken_up_again(folder: str) -> list[list[float]]:
    """A training that is saved in a window, at its end and in a short one, and one that goes on from there."""
    found = []
    for stop in (None, 2, 3, 4):
        plugin = GradientAccumulationPlugin(num_steps=3, average_over_window=True)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        training = Training(accelerator, loader(20 * accelerator.num_processes))
        (data,) = training.loaders
        for number, batch in enumerate(data, 1):
            training.micro_step(batch)
            if number == stop:
                accelerator.save_state(folder)
                break
        if stop is not None:
            training = Training(accelerator, loader(20 * accelerator.num_processes))
            accelerator._models[:], accelerator._optimizers[:] = [training.model], [training.optimizer]
            accelerator._dataloaders[:] = training.loaders
            accelerator.load_state(folder)
            for batch in training.loaders[0]:
                training.micro_step(batch)
        found.append(training.end()[3])
    return found


@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_a_window_goes_on_where_it_was_saved(size: int, tmp_path: Path) -> None:
    for whole, *resumed in run_on_ranks(taken_up_again, size, str(tmp_path / "state")):
        assert resumed == [whole] * 3
