"""A training goes on from the newest checkpoint that is complete, wherever it was saved."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb.config.environment import attempt_variables
from accelerate_nb.errors import CheckpointError
from accelerate_nb.runtime.checkpoints import folders
from tests.ranks import RanksFailed, run_on_ranks
from tests.runtime.checkpoints.test_kills import fill, training, value_of


def save(folder: str, *values: float, numbered: bool = False) -> None:
    accelerator, model = training(folder or None, numbered, None)
    for value in values:
        fill(model, value)
        accelerator.save_state(None if numbered else f"{folder}/at_{value:g}")


def found(folder: str, *, numbered: bool = False, requested: str | None = None) -> Any:
    """The value of the weights after `resume`, and the number of the next checkpoint; nothing where there was none."""
    accelerator, model = training(folder or None, numbered, None)
    if not accelerator.resume(requested):
        return None
    return value_of(model), accelerator.project_configuration.iteration


@pytest.fixture
def of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process belongs to an attempt of a run, and says to which."""

    def belongs_to(attempt: int, name: str = "run") -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        for variable, value in attempt_variables(tmp_path / name, attempt).items():
            monkeypatch.setenv(variable, value)

    return belongs_to


def test_where_nothing_was_saved_there_is_nothing_to_resume(tmp_path: Path) -> None:
    assert found(str(tmp_path)) is None
    assert found(str(tmp_path), numbered=True) is None
    assert found(str(tmp_path), requested=str(tmp_path / "not there")) is None
    assert found(str(tmp_path), requested=str(tmp_path)) is None


def test_the_newest_numbered_one_that_is_complete_is_taken(tmp_path: Path) -> None:
    save(str(tmp_path), *range(11), numbered=True)
    assert found(str(tmp_path), numbered=True) == (10.0, 11)
    os.truncate(tmp_path / "checkpoints" / "checkpoint_10" / "optimizer.bin", 5)
    with pytest.warns(UserWarning, match="checkpoint_10 is skipped, since it is not a whole checkpoint"):
        assert found(str(tmp_path), numbered=True) == (9.0, 11)  # the number is not given again


def test_a_folder_that_holds_checkpoints_may_be_given_as_well_as_one_of_them(tmp_path: Path) -> None:
    save(str(tmp_path), 3, 1, 2)
    (tmp_path / "notes").mkdir()
    assert found("", requested=str(tmp_path)) == (2.0, 0)
    assert found("", requested=str(tmp_path / "at_1")) == (1.0, 0)
    (tmp_path / "at_2" / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="at_2 is skipped"):
        assert found("", requested=str(tmp_path)) == (1.0, 0)


def test_without_a_folder_it_is_the_newest_that_this_run_has_saved(tmp_path: Path, of_a_run: Any) -> None:
    save(str(tmp_path), 7)
    of_a_run(0)
    assert found(str(tmp_path)) is None
    save(str(tmp_path), 1, 3, 2, 3)
    of_a_run(1)
    assert found(str(tmp_path)) == (3.0, 0)
    shutil.rmtree(tmp_path / "at_3")
    assert found(str(tmp_path)) == (2.0, 0)
    of_a_run(0, "another")
    assert found(str(tmp_path)) is None


def finds_where_ranks_have_disks_of_their_own(folder: str, lost: bool) -> Any:
    rank = int(os.environ["RANK"])
    os.environ.update(attempt_variables(Path(folder), 1))
    save(folder, 1.0, 2.0)
    # what this process can see is all that there is on its machine
    complete = folders._is_complete
    unseen = ("at_1", "at_2") if lost else ("at_2",)
    folders._is_complete = lambda path: not (rank == 1 and path.name in unseen) and complete(path)
    return found("")


def test_all_processes_go_on_from_the_same_one_and_where_one_has_none_that_is_an_error(tmp_path: Path) -> None:
    assert run_on_ranks(finds_where_ranks_have_disks_of_their_own, 2, str(tmp_path), False) == [(1.0, 0)] * 2
    with pytest.raises(RanksFailed, match=rf"(?s){CheckpointError.__name__}.*those with one are ranks 0"):
        run_on_ranks(finds_where_ranks_have_disks_of_their_own, 2, str(tmp_path), True)
