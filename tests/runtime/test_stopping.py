"""A run that is asked to stop ends after the same step on every rank, and whatever can't is ended all the same."""

import os
import threading
from itertools import count, islice
from pathlib import Path

import pytest
import torch

from accelerate_nb import Accelerator, launch
from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import StoppedError, StopRequested, WorkerError
from accelerate_nb.launching.launcher import prepare
from accelerate_nb.launching.run import FrontEnd, Run
from accelerate_nb.rank.step_hold import STOP, StepHold, StopPoint, current_step_hold
from accelerate_nb.runtime.training.local_sgd import LocalSGD
from tests.waiting import until

SETTINGS = {"num_processes": 2, "cpu": True, "config_file": "", "timeout": 60, "results": "all"}


def prepared(accelerator):
    model = torch.nn.Linear(4, 1)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def one_step(accelerator, model, optimizer):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
        optimizer.zero_grad()


def report_step(folder, step):
    if step == 3:
        Path(folder, os.environ.get("RANK", "0")).touch()


def acts(folder, act):
    """Act again and again, and give the numbers from 0 on."""
    for number in count():
        act()
        report_step(folder, number)
        yield number


def steps(folder, accelerator):
    model, optimizer = prepared(accelerator)
    return acts(folder, lambda: one_step(accelerator, model, optimizer))


def at_the_stop(accelerator, numbers):
    """The number at which this rank sees that a stop was requested, and those of all ranks."""
    number = next(number for number in numbers if accelerator.stop_requested)
    return number, accelerator.gather(torch.tensor([number])).tolist()


def until_training(run, folder, ranks=2):
    until(lambda: len(list(folder.iterdir())) >= ranks, run)


def stopped(folder, function, *args, **settings):
    """A run that was requested to stop once all of its ranks train."""
    settings = {**SETTINGS, **settings}
    run = launch(function, (str(folder), *args), **settings)
    until_training(run, folder, settings["num_processes"])
    run.stop()
    return run


def looks(folder, accumulation):
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    return at_the_stop(accelerator, steps(folder, accelerator))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_function_that_looks_returns_what_it_has_after_the_same_step_on_all_ranks(tmp_path, accumulation):
    run = stopped(tmp_path, looks, accumulation)
    (first, all_first), (second, _) = run.wait(60)
    assert first == second
    assert all_first == [first, first]
    assert (first + 1) % accumulation == 0
    assert run.view.state == "stopped"
    assert run.view.detail == f"as requested, after step {(first + 1) // accumulation}"


def saves_on_an_interrupt(folder):
    accelerator, step = Accelerator(), 0
    try:
        for number in steps(folder, accelerator):
            step = number
    except StopRequested:
        # it takes as long as it takes: the others wait here, for longer than the grace
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            threading.Event().wait(1.5)
        accelerator.wait_for_everyone()
        Path(folder, f"saved {os.environ['RANK']}").write_text(str(step))
        raise


def test_a_function_that_saves_on_an_interrupt_does_so_on_all_ranks_after_the_same_step(tmp_path):
    run = stopped(tmp_path, saves_on_an_interrupt, stop_grace_period=0.5)
    with pytest.raises(StoppedError, match=r"stopped, as requested, after step \d+") as caught:
        run.wait(60)
    assert isinstance(caught.value, WorkerError)
    assert isinstance(caught.value, KeyboardInterrupt)
    saved = [(tmp_path / f"saved {rank}").read_text() for rank in range(2)]
    assert saved[0] == saved[1]


def one_rank_looks(folder):
    accelerator = Accelerator()
    made = steps(folder, accelerator)
    return next(step for step in made if accelerator.is_main_process and accelerator.stop_requested)


def without_a_model(folder):
    accelerator = Accelerator()
    optimizer = accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    pause = threading.Event()
    for _ in acts(folder, optimizer.step):
        # the ranks are at different steps
        pause.wait(0.001 + 0.01 * accelerator.process_index)


def averages_now_and_then(folder):
    accelerator = Accelerator()
    model, optimizer = prepared(accelerator)
    with LocalSGD(accelerator, model, local_sgd_steps=7) as local:
        for _ in acts(folder, lambda: one_step(accelerator, model, optimizer)):
            local.step()


@pytest.mark.parametrize("function", [one_rank_looks, without_a_model, averages_now_and_then])
def test_ranks_that_go_their_own_ways_end_after_the_same_step(tmp_path, function):
    run = stopped(tmp_path, function)
    with pytest.raises(StoppedError, match=r"after step \d+"):
        run.wait(60)
    assert {failure.type for failure in run.view.failures} == {"StopRequested"}
    steps = {failure.message for failure in run.view.failures}
    assert len(steps) == 1


def evaluates(folder):
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(4, 1))

    @torch.no_grad()
    def evaluate():
        accelerator.gather_for_metrics(model(torch.ones(2, 4)))

    return at_the_stop(accelerator, acts(folder, evaluate))


def evaluates_after_training(folder):
    accelerator = Accelerator()
    model, optimizer = prepared(accelerator)
    for _ in range(3):
        one_step(accelerator, model, optimizer)
        assert not accelerator.stop_requested
    return evaluates(folder)


def steps_with_an_optimizer_of_its_own(folder):
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        accelerator.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()

    return at_the_stop(accelerator, acts(folder, step))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("function", [evaluates, evaluates_after_training, steps_with_an_optimizer_of_its_own])
def test_a_function_that_looks_and_makes_no_steps_returns_what_it_has_at_the_same_look(tmp_path, function, ranks):
    run = stopped(tmp_path, function, num_processes=ranks)
    found = run.wait(60)
    (first, _) = found[0]
    assert first >= 3
    assert found == [(first, [first] * ranks)] * ranks
    assert (run.view.state, run.view.detail) == ("stopped", "as requested, at stop_requested")


def one_rank_has_no_more_steps(folder):
    accelerator = Accelerator()
    optimizer = accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    for _ in islice(acts(folder, optimizer.step), None if accelerator.is_main_process else 5):
        pass
    accelerator.wait_for_everyone()


def hangs_in_a_step(folder):
    prepared(Accelerator())
    has_no_accelerator(folder)


def has_no_accelerator(folder):
    Path(folder, os.environ["RANK"]).touch()
    threading.Event().wait(60)


@pytest.mark.parametrize("function", [one_rank_has_no_more_steps, hangs_in_a_step, has_no_accelerator])
def test_ranks_that_don_t_come_to_a_step_are_ended_all_the_same(tmp_path, function):
    run = stopped(tmp_path, function, stop_grace_period=0.3)
    with pytest.raises(StoppedError, match="stopped, as requested"):
        run.wait(60)
    assert run.done
    assert run.view.state == "stopped"


def saves_slowly(folder):
    accelerator = Accelerator()
    model, optimizer = prepared(accelerator)
    done = Path(folder, f"saved {os.environ['RANK']}")

    def slow(models, weights, output_dir):
        Path(folder, os.environ["RANK"]).touch()
        # far longer than the grace
        threading.Event().wait(2.5)

    accelerator.register_save_state_pre_hook(slow)
    one_step(accelerator, model, optimizer)
    accelerator.save_state(Path(folder, "state"))
    done.touch()
    for _ in count():
        one_step(accelerator, model, optimizer)


def test_a_rank_that_saves_is_not_cut_off(tmp_path):
    run = stopped(tmp_path, saves_slowly, stop_grace_period=0.3)
    with pytest.raises(StoppedError, match=r"after step \d+"):
        run.wait(60)
    assert all((tmp_path / f"saved {rank}").exists() for rank in range(2))
    assert (tmp_path / "state").is_dir()


def fails_when_it_is_stopped(folder):
    accelerator = Accelerator()
    for _ in steps(folder, accelerator):
        if accelerator.stop_requested:
            raise OSError("no space left for what is to be saved")


def test_a_run_that_fails_while_it_stops_has_failed(tmp_path):
    run = stopped(tmp_path, fails_when_it_is_stopped)
    with pytest.raises(OSError, match="no space left"):
        run.wait(60)
    assert run.view.state == "failed"


def test_a_look_in_the_midst_of_a_step_or_after_one_is_no_boundary():
    hold = StepHold()
    hold.begin()
    for _ in range(3):
        hold.went_backward()
        hold.checked()
    hold.stepped()
    hold.checked()
    assert hold.hold(0, STOP).stepless_checks == 0
    hold.stop_at(StopPoint(9, raises=False, stepless_checks=1))
    assert hold.checked()


def test_time_after_the_steps_is_none_of_their_pace():
    hold = StepHold()
    assert not hold.hold(0, STOP).has_boundary
    hold.begin()
    threading.Event().wait(0.2)
    assert hold.hold(0, STOP).pace == 0
    hold.stop_at(StopPoint(2, raises=False))
    for _ in range(2):
        hold.stepped()
    pace = hold.hold(0, STOP).pace
    threading.Event().wait(0.2)
    assert hold.hold(0, STOP).pace == pace > 0


@pytest.mark.parametrize(("function", "arguments"), [(looks, (1,)), (evaluates, ())])
def test_a_function_in_this_process_receives_the_request_too(tmp_path, function, arguments):
    config = resolve({"engine": "inline", "cpu": True, "folder": str(tmp_path / "runs")}, {})
    run = Run(prepare(function, (str(tmp_path), *arguments), config), FrontEnd())

    def stops():
        until_training(run, tmp_path, ranks=2)
        run.request_stop("finish")

    thread = threading.Thread(target=stops)
    thread.start()
    (tmp_path / "runs").mkdir(exist_ok=True)
    run.start()
    thread.join(60)
    assert run.wait()[0] > 3
    assert run.view.state == "stopped"
    assert run.view.detail.startswith("as requested, a")
    # what was asked of the run is not asked of this process, which has others
    assert not current_step_hold().hold(0, STOP).has_boundary
    assert not Accelerator().stop_requested


class Impatient(FrontEnd):
    """Somebody presses the interrupt before anything is shown."""

    def opened(self, run):
        """Too early."""
        raise KeyboardInterrupt


def test_an_interrupt_before_anything_is_shown_ends_the_workers(tmp_path):
    config = resolve({"num_processes": 2, "cpu": True, "stop_grace_period": 0.1, "folder": str(tmp_path)}, {})
    run = Run(prepare(has_no_accelerator, (str(tmp_path),), config), Impatient())
    run.start()
    with pytest.raises(KeyboardInterrupt):
        run.wait(60)
    assert run.done
    assert run.view.state == "stopped"


def is_interrupted():
    raise KeyboardInterrupt


def test_a_function_in_this_process_that_is_interrupted_was_stopped(tmp_path):
    config = resolve({"engine": "inline", "cpu": True, "folder": str(tmp_path)}, {})
    run = Run(prepare(is_interrupted, (), config), FrontEnd())
    with pytest.raises(KeyboardInterrupt):
        run.start()
    assert run.view.state == "stopped"
