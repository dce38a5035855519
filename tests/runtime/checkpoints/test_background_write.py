"""A save in the background holds what was so when it was called, and tells of its failure at the next call."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints import writer
from accelerate_nb.runtime.checkpoints.host_copy import HostCopier
from tests.processes import python
from tests.ranks import ONE_OR_TWO, run_on_ranks
from tests.runtime.checkpoints.test_checkpoint import Training, resumed
from tests.runtime.checkpoints.test_kills import fill, training, value_of
from tests.runtime.loops import flat


def hold_writers() -> threading.Event:
    """Files are written when the event is set."""
    go, write = threading.Event(), writer.FileToWrite.write

    def late(self: writer.FileToWrite, folder: Path, blocks: Any) -> Any:
        go.wait(30)
        return write(self, folder, blocks)

    writer.FileToWrite.write = late  # type: ignore[method-assign]
    return go


def goes_on_while_it_is_written(folder: str) -> tuple[Any, Any, bool]:
    made = Training()
    made.epochs(1)
    go = hold_writers()
    made.accelerator.save_state(folder, blocking=False)
    seen_early = Path(folder).exists()
    before = flat(made.model), made.counter.count
    made.epochs(1)  # every state moves on before anything is written
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        made.accelerator.save_state(folder, blocking=False)
    assert "accelerate_nb checkpoint writer" in [thread.name for thread in threading.enumerate() if thread.is_alive()]
    go.set()
    assert made.accelerator.wait_for_checkpoint() == Path(folder)
    assert made.accelerator.wait_for_checkpoint() is None
    return before, made.losses[before[1] :], seen_early


@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_a_save_in_the_background_is_of_the_moment_of_the_call(tmp_path: Path, size: int) -> None:
    folder = str(tmp_path / "saved")
    written = run_on_ranks(goes_on_while_it_is_written, size, folder)
    read = run_on_ranks(resumed, size, folder, 1, "no")
    for (_, losses, seen_early), (losses_after, _) in zip(written, read, strict=True):
        assert losses_after == losses
        assert not seen_early


def fails_in_the_background(folder: str) -> list[str]:
    accelerator, model = training(folder, False)
    fill(model, 1.0)
    accelerator.save_state(f"{folder}/saved")
    write = writer.FileToWrite.write

    def full(self: writer.FileToWrite, to: Path, blocks: Any) -> Any:
        if self.name == "optimizer.bin":
            (to / self.name).symlink_to("/dev/full")
        return write(self, to, blocks)

    writer.FileToWrite.write = full  # type: ignore[method-assign]
    messages = []
    for call in (
        lambda: accelerator.save_state(f"{folder}/saved"),
        lambda: accelerator.load_state(f"{folder}/saved"),
        accelerator.wait_for_checkpoint,
        accelerator.end_training,
    ):
        fill(model, 2.0)
        accelerator.save_state(f"{folder}/saved", blocking=False)
        with pytest.raises(CheckpointError) as failure:
            call()
        messages.append(str(failure.value))
    return messages


@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_a_failure_in_the_background_is_reported_at_the_next_call_on_every_rank(tmp_path: Path, size: int) -> None:
    for messages in run_on_ranks(fails_in_the_background, size, str(tmp_path)):
        assert len(messages) == 4
        for message in messages:
            assert "optimizer.bin could not be written" in message
            assert "No space left on device" in message
    accelerator, model = training(str(tmp_path), False)
    accelerator.load_state(tmp_path / "saved")
    assert value_of(model) == 1.0
    accelerator.end_training()


PROGRAM = """
import sys, torch
from accelerate_nb import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(256, 256))
accelerator.save_state(sys.argv[1], blocking=False)
"""


@pytest.mark.slow
def test_a_program_that_ends_waits_for_what_it_saves(tmp_path: Path) -> None:
    done = python("-c", PROGRAM, tmp_path / "saved", check=True)
    assert done.stderr == ""
    assert (tmp_path / "saved" / "checkpoint.json").exists()


PULLED_AWAY = """
import pathlib, shutil, sys, threading
begin = threading.Thread.start
def start(self):
    if "writer" in self.name:
        shutil.rmtree(pathlib.Path(sys.argv[1]).parent)
    begin(self)
threading.Thread.start = start
"""


@pytest.mark.slow
def test_a_failure_that_nobody_waits_for_is_reported_at_the_programs_end(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    done = python("-c", PULLED_AWAY + PROGRAM, folder / "saved")
    assert "was not written" in done.stderr
    assert str(folder) in done.stderr


class Settings(Mapping[str, Any]):
    """A mapping that is not made of its items."""

    def __init__(self, width: int, names: list[str]) -> None:
        self.width, self.names = width, names

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


def test_copies_share_memory_as_their_originals_do_and_a_mapping_of_ones_own_is_copied_whole() -> None:
    whole, copier = torch.zeros(12), HostCopier()
    with pytest.raises(TypeError, match="pickle"):
        copier.copy([whole, threading.Lock()])  # one that fails leaves nothing for the next
    torch.arange(12.0, out=whole)
    state = {"low": whole[:4], "tied": whole[:4], "turned": whole.view(3, 4).t(), "deep": [(whole[2:3], 7, "text")]}
    state["conjugate"] = torch.tensor([1 + 2j]).conj()
    state["negative"] = state["conjugate"].imag
    own = Settings(3, ["a"])
    copied = copier.copy({**state, "own": own})
    copier.finish()
    whole.zero_()
    own.names.append("b")
    assert copied["low"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (copied["conjugate"].tolist(), copied["negative"].tolist()) == ([1 - 2j], [-2.0])
    assert copied["turned"].stride() == (1, 4)
    assert copied["deep"][0][1:] == (7, "text")
    assert copied["low"].untyped_storage().data_ptr() == copied["turned"].untyped_storage().data_ptr()
    assert copied["low"].data_ptr() == copied["tied"].data_ptr()
    assert copied["deep"][0][0].item() == 2.0
    assert type(copied["own"]) is Settings
    assert dict(copied["own"]) == {"width": 3, "names": ["a"]}


def test_what_is_written_in_the_background_is_no_larger(tmp_path: Path) -> None:
    accelerator, _ = training(str(tmp_path), False)
    folders = [accelerator.save_state(tmp_path / name, blocking=name == "now") for name in ("now", "later")]
    accelerator.end_training()
    now, later = ({path.name: path.stat().st_size for path in folder.glob("*[!n]")} for folder in folders)
    assert now == later


def saves_in_every_step(folder: str) -> tuple[Any, list[Any]]:
    made = Training()
    for inputs, targets in made.loader:
        made.step(inputs, targets)
        made.accelerator.save_state(folder, blocking=False)
    made.accelerator.end_training()
    return flat(made.model), made.losses


def test_saving_in_the_background_changes_no_number(tmp_path: Path) -> None:
    ((weights, losses),) = run_on_ranks(saves_in_every_step, 1, str(tmp_path / "saved"))
    made = Training()
    made.epochs(1)
    assert losses == made.losses
    assert weights == flat(made.model)
    made.accelerator.end_training()
