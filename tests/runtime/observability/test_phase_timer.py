"""Where the time of a step goes is measured, and what makes steps slow is said in words."""

import copy
import math
import pickle
import re
import threading
import time

import pytest
import torch
from msgspec import structs
from torch.utils.data import DataLoader, Dataset

from accelerate_nb import Accelerator
from accelerate_nb.events.event_types import StepBreakdown
from accelerate_nb.events.run_state import RunState
from accelerate_nb.rank.event_sink import connect
from accelerate_nb.reports.summary import step_causes
from accelerate_nb.runtime.observability import phase_timer
from accelerate_nb.runtime.observability.phase_timer import PhaseTimer
from tests.ranks import run_on_ranks
from tests.runtime.conftest import Listener

# seconds: much longer than anything else that these steps do
SLOW = 0.05
STEPS = 8
PARTS = ("data", "forward", "backward", "communication", "optimizer", "idle")


class Rows(Dataset):
    """Rows that take `seconds` each to read."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def __len__(self):
        return 2 * STEPS

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.ones(4)


@pytest.fixture
def listener(listener, monkeypatch):
    monkeypatch.setattr(phase_timer, "_BETWEEN", 0.0)
    return listener


def prepared(*loaders, **options):
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(4, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), *loaders)


def trained(rows, after_step=lambda: None, hook=None, **options):
    """Train on this rank, and return the parts of its first step and the means of the others."""
    phase_timer._BETWEEN = 0.0
    recorder = Listener()
    connect(recorder)
    accelerator, model, optimizer, loader = prepared(DataLoader(rows), **options)
    recorder.rank = accelerator.process_index
    if hook is not None:
        model.register_comm_hook(None, hook)
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    accelerator.wait_for_everyone()
    connect(None)
    first, *others = recorder.of(StepBreakdown)
    means = {part: sum(getattr(step, part) for step in others) / len(others) for part in PARTS}
    return first, StepBreakdown(first.rank, STEPS, **means, time=0.0, workers=first.workers)


def over_a_slow_network(_, bucket):
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    future = torch.futures.Future()

    def exchange():
        work.wait()
        time.sleep(SLOW)
        future.set_result(bucket.buffer())

    # a thread of its own: a callback of the work would be called by the backward itself where the work is done already
    threading.Thread(target=exchange, daemon=True).start()
    return future


def slow_trainings():
    """A training for each cause, on every rank."""
    is_last = Accelerator(cpu=True).process_index == 1
    return {
        "a slow rank": trained(Rows(SLOW if is_last else 0.0)),
        "the loader": trained(Rows(SLOW)),
        "communication": trained(Rows(), hook=over_a_slow_network),
        "own code": trained(Rows(), after_step=lambda: time.sleep(SLOW)),
    }


def causes_of(*events):
    view = RunState()
    for event in events:
        view.apply(event)
    return step_causes(view.glances())


def windows_of(steps):
    """The first step, and the others for so long that a rank may be called slow."""
    first, usual = steps
    return first, *(structs.replace(usual, step=1 + number * math.ceil(5 / usual.total + 50)) for number in range(1, 9))


SENTENCES = {
    "a slow rank": r"rank 1 is \S+ . (slower|as slow): \d\d % of its step is waiting for its loader \(num_workers=0\)",
    "the loader": r"waiting for the loader is \d\d % of the step \(num_workers=0\): pass num_workers=4 to the DataLoader",
    "communication": r"communication is \d\d % of the step: accumulate gradients, or use a larger batch",
    "own code": r"the loop's own code is \d\d % of the step: log, print and copy results every few steps only",
}


def test_what_makes_steps_slow_is_reported_in_words():
    ranks = run_on_ranks(slow_trainings, 2)
    for name, sentence in SENTENCES.items():
        found = causes_of(*(event for rank in ranks for event in windows_of(rank[name])))
        assert any(re.fullmatch(sentence, cause) for cause in found), (name, found)
    # a rank that waits for a slow one communicates as it should
    assert len(causes_of(*(event for rank in ranks for event in windows_of(rank["a slow rank"])))) == 1


def test_a_first_step_that_compiles_is_named(listener, monkeypatch):
    monkeypatch.setattr("accelerate_nb.reports.summary._FIRST_STEP", 0.05)
    first, steps = trained(Rows(), dynamo_backend="eager")
    assert first.compiled
    assert not steps.compiled
    found = causes_of(first, steps)
    assert re.fullmatch(r"first step \S+ m?s: compiling", found[0]), found


def test_a_first_step_that_waits_for_its_loader_is_named_and_steps_as_they_should_be_are_not():
    first = StepBreakdown(0, 1, 12.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, workers=8)
    assert causes_of(first) == ("first step 13.0 s: its loader took 12.0 s to begin (num_workers=8)",)
    usual = StepBreakdown(0, 9, 0.001, 0.02, 0.04, 0.002, 0.01, 0.001, 0.0)
    assert causes_of(StepBreakdown(0, 1, *[0.1] * 6, 0.0), usual) == ()


def test_every_part_of_a_step_is_counted_once(listener):
    began = time.perf_counter()
    trained(Rows(0.002))
    # `trained` listens itself, to every step
    assert listener.of(StepBreakdown) == []
    connect(listener)
    trained_for = time.perf_counter() - began
    first, steps = trained(Rows(0.002))
    assert first.step == 1
    assert steps.data >= 0.002
    assert min(getattr(steps, part) for part in PARTS if part != "communication") > 0
    assert steps.communication == 0
    assert first.total + (2 * STEPS - 1) * steps.total < 10 * trained_for


def test_an_evaluation_is_no_part_of_a_step(listener):
    accelerator, model, optimizer, loader, slow = prepared(DataLoader(Rows()), DataLoader(Rows(SLOW)))
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        for other in slow if len(listener.of(StepBreakdown)) == 3 else ():
            model.eval()(other)
        model.train()
    assert max(step.total for step in listener.of(StepBreakdown)[1:]) < 2 * STEPS * SLOW


def test_a_copy_of_a_model_or_a_file_of_it_measures_nothing_and_a_person_compiles_it_as_one_graph(listener):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(torch.ones(1, 4)), model(torch.ones(1, 4)))
        hooks = [*other._forward_pre_hooks.values(), *other._forward_hooks.values()]
        assert [type(hook).__module__ for hook in hooks] == ["builtins"] * 2
    assert model._forward_hooks
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_a_model_that_is_unwrapped_has_no_hooks_and_trains_on(listener):
    accelerator, model, optimizer, loader = prepared(DataLoader(Rows()))
    scripted = torch.jit.script(accelerator.unwrap_model(model))
    assert torch.equal(scripted(torch.ones(1, 4)), model(torch.ones(1, 4)))
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
    assert min(step.forward for step in listener.of(StepBreakdown)) > 0


def test_a_model_that_is_compiled_in_place_has_a_forward_too(listener):
    timer = PhaseTimer(0, torch.device("cpu"), 1)
    model = torch.nn.Linear(4, 1)
    model.compile(backend="eager")
    timer.watch(model)
    assert not model._forward_hooks
    timer.restart()
    for batch in timer.batches([torch.ones(1, 4)] * 3, None):
        time.sleep(0.002)
        with timer.backward(batch):
            pass
        timer.begin("optimizer")
        timer.stepped()
    assert min(step.forward for step in listener.of(StepBreakdown)) >= 0.002


class Event:
    """An event in the stream of a GPU that has happened once `done` says so."""

    done = False
    now = 0.0

    def __init__(self, enable_timing):
        self.at = None

    def record(self, stream):
        Event.now += 10.0
        self.at = Event.now

    def query(self):
        return Event.done

    def elapsed_time(self, other):
        return other.at - self.at


def test_on_a_gpu_events_count_nothing_waits_for_them_and_a_graph_that_is_captured_holds_none(listener, monkeypatch):
    # this machine may have no GPU
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(phase_timer._GpuClock, "pause", 0.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    timer = PhaseTimer(0, torch.device("cuda:0"), 1)
    timer.restart()
    begun = Event.now
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(Event, "query", lambda event: pytest.fail("a look at an event breaks a capture off"))
        with timer.backward(None):
            pass
        timer.stepped()
    assert (Event.now, listener.of(StepBreakdown)) == (begun, [])
    timer.restart()
    for _ in range(2):
        with timer.backward(None):
            pass
        timer.begin("optimizer")
        timer.stepped()
    assert listener.of(StepBreakdown) == []
    monkeypatch.setattr(Event, "done", True)
    timer.stepped()
    steps = listener.of(StepBreakdown)[:2]
    assert [(step.step, step.backward, step.optimizer) for step in steps] == [(1, 0.01, 0.01), (2, 0.01, 0.01)]
