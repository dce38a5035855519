"""A kill at any moment of a save leaves a whole checkpoint: the former one, or the new one."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_nb import Accelerator
from accelerate_nb.runtime.checkpoints import folders, manifest, writer
from accelerate_nb.utils.dataclasses import ProjectConfiguration
from tests.ranks import RanksFailed, run_on_ranks

# Each moment: the module and the name of what is called then, at which call, and the value that is found afterwards.
MOMENTS = {
    "before the folder is made": (folders, "clear", 1, 1.0),
    "while files are written": (writer, "sync", 2, 1.0),
    "before the files are listed": (manifest, "write", 1, 1.0),
    "before the new one is there": (folders, "commit", 1, 1.0),
    "when the new one is there": (folders, "_clear_former", 1, 2.0),
}


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def make_deadly(module: Any, name: str, call: int) -> None:
    """The `call`-th call of a function is the process's last."""
    function, calls = getattr(module, name), iter(range(1, 1000))

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            dies()
        return function(*args, **kwargs)

    setattr(module, name, deadly)


def training(folder: str | None, numbered: bool, limit: int | None = 1) -> tuple[Accelerator, nn.Module]:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=numbered, total_limit=limit)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return accelerator, accelerator.prepare(model, optimizer)[0]


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def value_of(model: nn.Module) -> float:
    """The mean of each parameter, which is one."""
    (value,) = {parameter.mean().item() for parameter in model.parameters()}
    return value


def saves_and_dies(folder: str, moment: str, numbered: bool, rank: int, blocking: bool) -> None:
    accelerator, model = training(folder, numbered)
    path = None if numbered else f"{folder}/saved"
    fill(model, 1.0)
    accelerator.save_state(path)
    (Path(folder) / "saved" / "notes.txt").write_text("mine") if not numbered else None
    accelerator.wait_for_everyone()
    module, name, call, _ = MOMENTS[moment]
    if accelerator.process_index == rank:
        make_deadly(module, name, call)
    fill(model, 2.0)
    accelerator.save_state(path, blocking=blocking)
    accelerator.wait_for_checkpoint()


def finds(folder: str, numbered: bool, name: str = "saved", saves: bool = True) -> float:
    accelerator, model = training(folder, numbered)
    accelerator.load_state(None if numbered else f"{folder}/{name}")
    value = value_of(model)
    accelerator.project_configuration.iteration = 9
    if saves:  # what was left half-way is in nobody's way
        accelerator.save_state(None if numbered else f"{folder}/{name}")
    return value


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_folder_that_is_saved_to_again_is_whole_after_a_kill(tmp_path: Path, moment: str) -> None:
    with pytest.raises(RanksFailed, match="exit code -9"):
        run_on_ranks(saves_and_dies, 1, str(tmp_path), moment, False, 0, "files" in moment)
    assert (tmp_path / "saved" / "model.safetensors").exists()  # also for who doesn't know of drafts
    assert run_on_ranks(finds, 1, str(tmp_path), False) == [MOMENTS[moment][3]]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert (tmp_path / "saved" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("moment", ["while files are written", "before the new one is there"])
def test_the_newest_whole_one_of_numbered_checkpoints_is_found_after_a_kill(tmp_path: Path, moment: str) -> None:
    with pytest.raises(RanksFailed, match="exit code -9"):
        run_on_ranks(saves_and_dies, 1, str(tmp_path), moment, True, 0, True)
    assert run_on_ranks(finds, 1, str(tmp_path), True) == [1.0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_9"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_where_two_folders_can_not_be_exchanged_at_once_the_new_one_takes_the_formers_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    paths = folders.CheckpointPaths.of(tmp_path / "saved")
    for content in ("former", "new"):
        folders.clear(paths)
        (paths.draft / "model.safetensors").write_text(content)
        folders.commit(paths)
    assert (tmp_path / "saved" / "model.safetensors").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def dies_while_pruning(folder: str) -> None:
    accelerator, model = training(folder, True)
    fill(model, 1.0)
    accelerator.save_state()
    fill(model, 2.0)

    def half(path: Any, *args: Any, **kwargs: Any) -> None:
        if (doomed := Path(path) / "checkpoint_0.deleted").exists():
            (doomed / "model.safetensors").unlink()
            dies()
        rmtree(path, *args, **kwargs)

    rmtree, shutil.rmtree = shutil.rmtree, half  # type: ignore[assignment]
    accelerator.save_state()


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_the_new_one_and_no_half_one(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="exit code -9"):
        run_on_ranks(dies_while_pruning, 1, str(tmp_path))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]
    assert run_on_ranks(finds, 1, str(tmp_path), True) == [2.0]


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "in the background"])
def test_a_rank_that_is_killed_while_it_writes_keeps_the_new_checkpoint_from_appearing(
    tmp_path: Path, blocking: bool
) -> None:
    with pytest.raises(RanksFailed, match="rank 1: died without a word, exit code -9"):
        run_on_ranks(saves_and_dies, 2, str(tmp_path), "while files are written", False, 1, blocking)
    assert run_on_ranks(finds, 2, str(tmp_path), False) == [1.0, 1.0]


def half_of_the_renames(folder: str) -> None:
    accelerator, model = training(folder, False)
    fill(model, 1.0)
    accelerator.save_state(f"{folder}/project")
    fill(model, 2.0)
    make_deadly(folders, "remove", 1)
    replace, calls = Path.replace, iter(range(1000))

    def deadly(self: Path, target: Path) -> Path:
        if next(calls) == 2:
            dies()
        return replace(self, target)

    Path.replace = deadly  # type: ignore[method-assign]
    accelerator.save_state(f"{folder}/project")


def test_a_folder_that_cannot_be_exchanged_is_brought_to_its_end_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "project" / "others").mkdir(parents=True)
    (tmp_path / "project" / "others" / "work.txt").write_text("theirs")
    with pytest.raises(RanksFailed, match="exit code -9"):
        run_on_ranks(half_of_the_renames, 1, str(tmp_path))
    assert run_on_ranks(finds, 1, str(tmp_path), False, "project", False) == [2.0]
    assert (tmp_path / "project" / "others" / "work.txt").read_text() == "theirs"
    assert not (tmp_path / "project" / ".incomplete").exists()


def test_a_folder_that_can_not_be_listed_is_an_error_and_is_not_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_secret(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", is_secret)
    with pytest.raises(PermissionError):
        folders.CheckpointPaths.of(tmp_path)
