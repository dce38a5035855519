"""A training's speed, gradient norm, learning rate and memory are metrics that nobody has to log."""

import pickle
import threading

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator, launch
from accelerate_nb.events.event_types import DeviceSample, MemoryUse, Metric, PrecisionChoice
from accelerate_nb.events.run_reader import kept_run
from accelerate_nb.rank.event_sink import connect
from accelerate_nb.runtime.observability import step_metrics
from accelerate_nb.runtime.observability.phase_timer import PhaseTimer
from accelerate_nb.runtime.observability.step_metrics import MemoryReporter, StepMetrics

ALWAYS = {"speed/step_time_s", "optimizer/lr"}
SENTENCES = [{"input_ids": torch.full((5,), index), "weight": torch.ones(1)} for index in range(12)]


@pytest.fixture
def listener(listener, monkeypatch):
    # every step is a point
    monkeypatch.setattr(step_metrics, "_BETWEEN", 0.0)
    return listener


def prepared(**options):
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(SENTENCES, batch_size=3))


def train(accelerator, model, optimizer, loader, clip=True, after_step=lambda: None):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["weight"]).sum() * 2)
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
        after_step()


def test_a_training_has_its_metrics_and_reports_its_precision_without_a_line_for_them(listener):
    train(*prepared(mixed_precision="bf16"))
    assert [event.name for event in listener.of(PrecisionChoice)] == ["bf16"]
    assert {metric.name for metric in listener.of(Metric)} == {
        *ALWAYS, "speed/samples_per_s", "speed/tokens_per_s", "optimizer/grad_norm", "memory/process_gib", "epoch"
    }  # fmt: skip
    assert listener.values("optimizer/lr") == [0.5] * 3
    # the weight's gradient is the sum of three ones, times two, and the bias's is the same
    assert listener.values("optimizer/grad_norm")[0] == pytest.approx(72**0.5)
    # the first step, which is slower than all others, is none of them
    assert listener.values("epoch") == [0.5, 0.75, 1.0]
    times = zip(listener.values("speed/step_time_s"), listener.values("speed/samples_per_s"), strict=True)
    assert all(seconds * rate == pytest.approx(3) for seconds, rate in times)
    assert listener.values("speed/tokens_per_s")[0] == pytest.approx(5 * listener.values("speed/samples_per_s")[0])


def test_an_evaluation_between_two_steps_counts_for_nothing_and_accumulated_batches_are_one_step(listener):
    accelerator, model, optimizer, loader = prepared()
    evaluation = accelerator.prepare(DataLoader(SENTENCES, batch_size=6))
    train(accelerator, model, optimizer, loader, after_step=lambda: list(evaluation))
    assert listener.values("epoch") == [0.5, 0.75, 1.0]
    train(*prepared(gradient_accumulation_steps=2))
    times = zip(listener.values("speed/step_time_s"), listener.values("speed/samples_per_s"), strict=True)
    assert [round(seconds * rate) for seconds, rate in times] == [3, 3, 3, 6]


class Gauge:
    """Stands for NVIDIA's library, which is not on every machine; its driver responds when it is told to."""

    responds = threading.Event()

    def __init__(self, environment):
        pass

    def sample(self, index, now):
        self.responds.wait()
        return DeviceSample(index, f"cuda:{index}", 30.0 + index, 1, 2, now)


def test_a_gpu_has_its_memory_and_its_use_and_no_step_waits_for_its_driver(listener, monkeypatch):
    monkeypatch.setattr(step_metrics, "GpuGauge", Gauge)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 3 * 2**30)
    metrics = StepMetrics(0, torch.device("cuda", 1), 1.0, PhaseTimer(0, torch.device("cpu"), 1))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    for _ in range(3):
        metrics.stepped(optimizer)
    assert set(listener.values("memory/gpu_gib")) == {3.0}
    assert listener.values("speed/gpu_percent") == []
    Gauge.responds.set()
    metrics._gpu._sampling.join()
    metrics.stepped(optimizer)
    assert listener.values("speed/gpu_percent") == [31.0]


def test_the_second_optimizer_of_a_step_makes_no_step_of_its_own(listener):
    accelerator, model, optimizer, loader = prepared()
    other = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    train(accelerator, model, optimizer, loader, after_step=other.step)
    assert listener.values("optimizer/lr") == [0.5] * 3


def test_points_are_at_most_four_a_second(listener, monkeypatch):
    monkeypatch.setattr(step_metrics, "_BETWEEN", 1000.0)
    train(*prepared())
    assert len(listener.values("speed/step_time_s")) == 1


def test_copies_of_what_is_prepared_measure_nothing_and_neither_does_anything_where_nobody_watches(listener):
    _, _, optimizer, loader = prepared()
    assert pickle.loads(pickle.dumps(loader)).step_metrics is None
    assert pickle.loads(pickle.dumps(optimizer))._after_step is None
    connect(None)
    assert prepared()[0].step_metrics is None


def in_a_worker():
    accelerator, *others = prepared()
    train(accelerator, *others, clip=False)
    for step in range(3):
        accelerator.log({"accuracy": 0.5, "train_loss": 3.0 - step, "rank": accelerator.process_index}, step=step)


@pytest.mark.parametrize("autolog", [None, pytest.param(False, marks=pytest.mark.slow)])
def test_a_launch_shows_them_unless_they_are_switched_off(autolog):
    settings = {"num_processes": 2, "cpu": True, "config_file": "", "timeout": 60, "panel": "off", "autolog": autolog}
    run = launch(in_a_worker, **settings)
    run.wait(60)
    names = [set(glance.metrics) for glance in run.view.glances()]
    assert [found >= ALWAYS for found in names] == [autolog is None] * 2
    # what is logged is shown of every process, though no tracker is named
    for rank in range(2):
        shown = run.view.rank(rank).series["rank"]
        assert [(metric.step, metric.value) for metric in shown] == [(0, rank), (1, rank), (2, rank)]
    # its folder says how it went, and with what
    kept = kept_run(run.folder)
    assert kept.metrics == {"accuracy": 0.5, "train_loss": 1.0, "rank": 0.5}
    assert kept.curve == ("train_loss", "█▅▁")
    assert kept.settings["num_processes"] == 2


def test_the_first_step_counts_what_is_held_and_the_process(listener, monkeypatch):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(1000, 500), torch.nn.BatchNorm1d(500, affine=False))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    monkeypatch.setattr(step_metrics, "resident_bytes", lambda: 10**9)

    def step():
        accelerator.backward(model(torch.randn(4, 1000)).sum())
        optimizer.step()
        optimizer.zero_grad()

    step()
    (found,) = listener.of(MemoryUse)
    weights = 4 * 500 * 1001
    buffers = 4 * 2 * 500 + 8
    # Adam has two numbers of each weight, and counts steps for each parameter
    assert (found.weights, found.gradients, found.optimizer) == (weights + buffers, weights, 2 * weights + 2 * 4)
    assert (found.peak, found.used, found.total) == (None, 10**9, None)
    # soon after, nothing is measured again; later only where it has changed
    step()
    assert len(listener.of(MemoryUse)) == 1
    monkeypatch.setattr(step_metrics, "_BETWEEN_READINGS", 0.0)
    step()
    assert len(listener.of(MemoryUse)) == 1
    monkeypatch.setattr(step_metrics, "resident_bytes", lambda: 2 * 10**9)
    step()
    assert [event.used for event in listener.of(MemoryUse)] == [10**9, 2 * 10**9]


def test_tensors_elsewhere_are_not_of_the_device(listener, monkeypatch):
    with torch.device("meta"):
        model = torch.nn.Linear(1000, 500)
    reporter = MemoryReporter([model, torch.nn.Linear(2, 1)], [], torch.device("cpu"))
    reporter.first_step()
    assert listener.events[0].weights == 4 * 3
