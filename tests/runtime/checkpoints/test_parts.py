"""Checkpoints in parts: of the moment of the call, whole after a kill, exact on any number of ranks, and never run as code."""

import copy
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate_nb import Accelerator
from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints import named_states, saver, writer as files
from accelerate_nb.utils import FullyShardedDataParallelPlugin
from tests.ranks import RanksFailed, run_on_ranks
from tests.runtime.checkpoints.test_damage import Evil, cut, empty, flip
from tests.runtime.checkpoints.test_kills import fill, make_deadly

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


class Training:
    """A model and an optimizer that remembers more than one number for each weight."""

    def __init__(self, seed: int = 0, state_dict_type: str = "SHARDED_STATE_DICT") -> None:
        torch.manual_seed(seed)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=state_dict_type)
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def step(self, count: int = 1) -> None:
        for number in range(count):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            self.accelerator.backward(self.model(inputs).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def content(self) -> Any:
        """All numbers, whole."""
        remembered = [
            {name: _whole(value) for name, value in self.optimizer.state[weight].items()}
            for weight in self.model.parameters()
        ]
        groups = [{**group, "params": len(group["params"])} for group in self.optimizer.param_groups]
        return [_whole(weight) for weight in self.model.parameters()], remembered, groups


def _whole(value: Any) -> Any:
    return value.full_tensor().detach() if isinstance(value, DTensor) else copy.deepcopy(value)


def check_exact(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def trains_on_while_it_is_written(folder: str) -> None:
    training = Training()
    training.step(2)
    wanted = training.content()
    training.accelerator.save_state(folder, blocking=False)
    training.step(3)
    training.accelerator.wait_for_checkpoint()
    after = training.content()
    training.accelerator.load_state(folder)
    check_exact(training.content(), wanted)
    training.step(3)
    check_exact(training.content(), after)


def test_a_save_in_the_background_has_the_moment_of_its_call_and_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run_on_ranks(trains_on_while_it_is_written, 2, str(tmp_path / "checkpoint"))


def saves(folder: str, state_dict_type: str = "SHARDED_STATE_DICT") -> Any:
    training = Training(0, state_dict_type)
    training.step(2)
    training.accelerator.save_state(folder)
    return training.content()


def loads(folder: str, steps: int = 0) -> Any:
    training = Training(1)
    training.step(steps)
    training.accelerator.load_state(folder)
    return training.content()


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [(2, 1), *(pytest.param(*ranks, marks=pytest.mark.slow) for ranks in ((1, 2), (4, 2), (2, 4), (4, 3)))],
)
@pytest.mark.parametrize("state_dict_type", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_another_number_of_ranks_has_the_same_numbers(
    tmp_path: Path, state_dict_type: str, saved_by: int, loaded_by: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    wanted = run_on_ranks(saves, saved_by, folder, state_dict_type)[0]
    for found in run_on_ranks(loads, loaded_by, folder, 1):
        check_exact(found, wanted)


def saves_before_it_steps(folder: str, state_dict_type: str) -> None:
    plain, training = Training(), Training(0, state_dict_type)
    training.accelerator.save_state(folder)
    training.step()
    training.accelerator.load_state(folder)
    for trained in (plain, training):
        trained.step(2)
    check_exact(training.content(), plain.content())
    training.accelerator.save_state(folder)
    new = Training(1, state_dict_type)
    new.model(torch.ones(4, 6)).sum().backward()
    new.accelerator.load_state(folder)
    check_exact(new.content(), plain.content())


@pytest.mark.parametrize("state_dict_type", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_save_before_the_first_step_changes_nothing_and_a_load_then_is_exact(
    tmp_path: Path, state_dict_type: str
) -> None:
    run_on_ranks(saves_before_it_steps, 1, str(tmp_path / "checkpoint"), state_dict_type)


# Each moment that a checkpoint in parts adds to those of `test_kills`: the module and the name of what is called then, at which
# call, and on which rank.
MOMENTS = {
    "before the other rank writes": (saver, "write_files", 1, 1),
    "while the first rank's parts are written": (files, "sync", 2, 0),
    "while the other rank's parts are written": (files, "sync", 2, 1),
    "before parts are noted": (named_states, "_note", 1, 1),
    "before they are listed": (named_states, "_note", 4, 0),
    "when they are listed": (named_states, "sync", 1, 0),
}


def saves_and_dies(folder: str, moment: str) -> None:
    training = Training()
    training.step()
    fill(training.model, 1.0)
    training.accelerator.save_state(folder)
    fill(training.model, 2.0)
    module, name, call, rank = MOMENTS[moment]
    if training.accelerator.process_index == rank:
        make_deadly(module, name, call)
    training.accelerator.save_state(folder)


def finds(folder: str) -> set[float]:
    training = Training()
    training.accelerator.load_state(folder)
    found = {float(value) for weight in training.content()[0] for value in weight.flatten()}
    training.accelerator.save_state(folder)  # what was left half-way is in nobody's way
    return found


@pytest.mark.parametrize(
    "moment", [pytest.param(moment, marks=() if "other" in moment else pytest.mark.slow) for moment in MOMENTS]
)
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path, moment: str) -> None:
    folder = str(tmp_path / "checkpoint")
    with pytest.raises(RanksFailed, match="exit code -9"):
        run_on_ranks(saves_and_dies, 2, folder, moment)
    assert run_on_ranks(finds, 2, folder) == [{1.0}] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert not list(tmp_path.rglob("*.written"))


def with_code_in_a_value(path: Path) -> None:
    """An entry that is no tensor holds what runs code; the list has its place."""
    metadata = pickle.loads((path.parent / ".metadata").read_bytes())
    index, place = next((index, place) for index, place in metadata.storage_data.items() if index.fqn.endswith("lr"))
    path = path.parent / place.relative_path
    content = path.read_bytes()
    evil = path.parent / "evil.pt"
    torch.save(Evil(path.parents[2] / "proof"), evil)
    metadata.storage_data[index] = type(place)(place.relative_path, len(content), evil.stat().st_size)
    path.write_bytes(content + evil.read_bytes())
    evil.unlink()
    (path.parent / ".metadata").write_bytes(pickle.dumps(metadata))


Damage = Callable[[Path], None]
# Each damage, the file, and whether the list of sums is there, which Accelerate's checkpoints don't have.
DAMAGES: dict[str, tuple[Damage, str, bool]] = {
    "a part is cut": (cut, f"{MODEL}/__1_0.distcp", True),
    "a part is cut, without sums": (cut, f"{MODEL}/__1_0.distcp", False),
    "a part is gone": (Path.unlink, f"{OPTIMIZER}/__1_0.distcp", True),
    "a part is gone, without sums": (Path.unlink, f"{OPTIMIZER}/__1_0.distcp", False),
    "a byte of a part is another": (flip, f"{MODEL}/__1_0.distcp", True),
    "a byte of the other part is another": (flip, f"{OPTIMIZER}/__0_0.distcp", True),
    "a byte of the list is another": (flip, f"{MODEL}/.metadata", True),
    "the list is cut": (cut, f"{OPTIMIZER}/.metadata", True),
    "the list is cut, without sums": (cut, f"{OPTIMIZER}/.metadata", False),
    "the list is empty, without sums": (empty, f"{MODEL}/.metadata", False),
    "the list is gone": (Path.unlink, f"{MODEL}/.metadata", True),
    "the list is gone, without sums": (Path.unlink, f"{MODEL}/.metadata", False),
    "a value has code": (with_code_in_a_value, f"{OPTIMIZER}/.metadata", False),
}


def refuses(folder: str, damages: list[str]) -> list[tuple[str, str]]:
    training = Training(1)
    training.step()
    wanted = training.content()
    messages = []
    for name in damages:
        with pytest.raises(CheckpointError) as failure:
            training.accelerator.load_state(f"{folder}/{name}")
        messages.append((name, str(failure.value)))
        check_exact(training.content(), wanted)
    return messages


def test_damage_is_named_runs_no_code_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    run_on_ranks(saves, 2, str(folder))
    for name, (damage, file, has_sums) in DAMAGES.items():
        copied = tmp_path / name
        shutil.copytree(folder, copied)
        if not has_sums:
            (copied / "checkpoint.json").unlink()
        damage(copied / file)
    for messages in run_on_ranks(refuses, 2, str(tmp_path), list(DAMAGES)):
        for name, message in messages:
            _, file, _ = DAMAGES[name]
            assert message.startswith(str(tmp_path / name)), (name, message)
            assert file.rpartition("/")[0] in message, (name, message)
    assert not (tmp_path / "proof").exists()


def test_an_optimizer_that_has_not_stepped_has_no_state_after_a_refused_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    (tmp_path / named_states.optimizer_folder(0)).mkdir()
    (tmp_path / named_states.optimizer_folder(0) / named_states.LIST).touch()
    shards = SimpleNamespace(positions={"optimizer.state.weight.step": ("optimizer", "state", "weight", "step")})
    monkeypatch.setattr(named_states, "list_shards", lambda _: shards)

    def breaks(_: nn.Module, given: torch.optim.Optimizer) -> None:
        # as torch makes a state of the right shapes
        given.state[model.weight] = {"step": torch.zeros(())}
        raise KeyboardInterrupt

    monkeypatch.setattr(named_states.states, "get_optimizer_state_dict", breaks)
    with pytest.raises(KeyboardInterrupt):
        named_states.load_optimizer(tmp_path, 0, optimizer, [model])
    assert not optimizer.state
