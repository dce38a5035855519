"""Ranks that fail start again from the newest checkpoint, with the numbers of a run that never failed; others end, and say why."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator, StoppedError, launch, notebook_launcher
from accelerate_nb.events.run_reader import kept_runs
from accelerate_nb.utils.dataclasses import ProjectConfiguration
from accelerate_nb.utils.memory import find_executable_batch_size
from tests.runtime.loops import flat, net, samples
from tests.waiting import until

TWO = {"num_processes": 2, "cpu": True, "config_file": "", "timeout": 60, "results": "all", "restart_delay": 0.01}
SAVE_EVERY = 3


@pytest.fixture
def again(tmp_path: Path) -> Any:
    """Launches a function with restarts; its first argument is the folder of the test."""

    def start(function: Any, *args: Any, max_restarts: int = 2, **settings: Any) -> Any:
        asked = {**TWO, "folder": str(tmp_path / "runs"), "max_restarts": max_restarts, "panel": "off", **settings}
        return launch(function, (str(tmp_path), *args), **asked)

    return start


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fails(*_: str) -> None:
    raise ConnectionResetError("a cable was pulled")


def trains(folder: str, fault: Any = None, at: int = 0, numbered: bool = False) -> tuple[bool, Any]:
    """
    Two epochs with all that has a state: dropout, momentum, a schedule, a shuffled loader, generators.

    In the first attempt rank 1 meets its fault at a micro-step.
    """
    torch.manual_seed(3)
    random.seed(3)
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=numbered, total_limit=2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=project)
    built = net(dropout=0.3)
    adam = torch.optim.AdamW(built.parameters(), lr=0.05)
    decay = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (1 + step))
    shuffled = DataLoader(samples(48), batch_size=3, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(built, adam, decay, shuffled)
    resumed, draws = accelerator.resume(), 0.0
    for _ in range(loader.iteration, 2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            draws = random.random() + torch.rand(1).item()
            done = 8 * loader.iteration + loader.batches_read
            if fault is not None and accelerator.process_index == 1 and attempt() == 0 and done == at:
                fault()
            if done % SAVE_EVERY == 0:
                accelerator.save_state(None if numbered else f"{folder}/saved")
    moments = [value.tolist() for item in optimizer.state_dict()["state"].values() for value in item.values()]
    return resumed, (flat(model), moments, schedule.get_last_lr(), draws, accelerator.step)


def dies_while_files_are_written() -> None:
    """From now on, to have written a checkpoint's file is a process's last."""
    from accelerate_nb.runtime.checkpoints import writer

    writer.sync = lambda *_: dies()


# ---------------------------------------------------------------------------------------------------------- the same numbers


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed")
    return [
        found for _, found in launch(trains, (str(folder),), folder=str(folder / "runs"), panel="off", **TWO).wait()
    ]


@pytest.mark.parametrize(
    ("fault", "at", "numbered", "detach"),
    [
        (dies, 5, True, False),
        (dies_while_files_are_written, 8, False, False),
        pytest.param(dies, 11, False, False, marks=pytest.mark.slow),
        pytest.param(fails, 10, True, False, marks=pytest.mark.slow),
        pytest.param(dies, 5, True, True, marks=pytest.mark.slow),
        # before the first checkpoint
        pytest.param(dies, 2, False, False, marks=pytest.mark.slow),
    ],
)
def test_numbers_after_a_restart_are_those_of_a_run_that_never_failed(
    again: Any, undisturbed: Any, fault: Any, at: int, numbered: bool, detach: bool
) -> None:
    run = again(trains, fault, at, numbered, detach=detach)
    assert run.wait(60) == [(at >= SAVE_EVERY, found) for found in undisturbed]
    assert [item.attempt for item in run.view.restarts] == [1]
    assert run.state == "finished"


# ------------------------------------------------------------------------------------------------------------ what is told


def steps_then_fails(_: str, at: int = 0) -> int:
    """Print the attempt, make a step of torch's own, fail; from attempt `at` on, return it."""
    print("this is attempt", attempt(), flush=True)
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter]).step()
    if attempt() >= at > 0:
        return attempt()
    raise ConnectionResetError(f"failure {attempt()}")


def test_each_attempt_has_its_own_logs_and_all_lines_are_shown(again: Any, capfd: pytest.CaptureFixture[str]) -> None:
    run = again(steps_then_fails, 2, panel="text", num_processes=1)
    assert run.wait() == [2]
    logs = [run.folder / "attempt_0", run.folder / "attempt_1", run.folder]
    assert [(folder / "rank_0.log").read_text() for folder in logs] == [f"this is attempt {i}\n" for i in range(3)]
    assert run.logs(0) == "this is attempt 2\n"
    shown, messages = capfd.readouterr()
    assert [shown.count(f"this is attempt {i}\n") for i in range(3)] == [1, 1, 1]
    assert "restart 1 of 2, after 0.01 s: rank 0 stopped with ConnectionResetError: failure 0" in messages
    (kept,) = kept_runs(run.folder.parent)
    assert (kept.restarts, kept.error) == (2, "")


def test_a_run_whose_attempts_make_no_step_is_given_up(again: Any) -> None:
    run = again(fails, num_processes=1, max_restarts=100)
    text = "It was not started again: 5 attempts in a row ended before their first optimizer step"
    with pytest.raises(ConnectionResetError, match=text):
        run.wait()
    assert len(run.view.restarts) == 4


# --------------------------------------------------------------------------------------------------------------- ended by us


def test_a_stop_in_the_pause_before_a_restart_ends_the_run(again: Any) -> None:
    run = again(steps_then_fails, num_processes=1, restart_delay=60)
    until(lambda: bool(run.view.restarts))
    run.request_stop("finish")
    with pytest.raises(StoppedError):
        run.wait(30)
    assert run.state == "stopped"


# ----------------------------------------------------------------------------------------------------------- size of batches


def finds_a_size(folder: str) -> list[int]:
    accelerator = Accelerator(cpu=True)
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size > 90 and accelerator.process_index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if attempt() == 0 and batch_size == 90:
            dies()

    train()
    return tried


def test_the_size_of_a_batch_that_fitted_is_known_after_a_restart(again: Any) -> None:
    assert again(finds_a_size).wait() == [[90]] * 2


@pytest.mark.slow
def test_a_script_can_resume_without_restarts_and_a_fresh_one_has_nothing_to_resume(tmp_path: Path) -> None:
    settings = {**TWO, "folder": str(tmp_path / "runs"), "panel": "off"}
    first = notebook_launcher(trains, (str(tmp_path), None, 0, True), **settings)
    second = notebook_launcher(trains, (str(tmp_path), None, 0, True), **settings)
    assert [resumed for resumed, _ in (*first, *second)] == [False, False, True, True]
    assert [numbers[0] for _, numbers in first] == [numbers[0] for _, numbers in second]
