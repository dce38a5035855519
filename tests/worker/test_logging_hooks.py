"""What code logs by another library, or shows beside a bar, is a metric of its rank."""

import os
import time
from types import ModuleType, SimpleNamespace

import pytest

from accelerate_nb import launch
from accelerate_nb.rank import event_sink
from accelerate_nb.rank.event_sink import connect
from accelerate_nb.worker import logging_hooks

SETTINGS = {"num_processes": 1, "cpu": True, "config_file": "", "timeout": 60, "panel": "off"}


def metrics_of(function, *arguments, **settings):
    """What a function of a worker logged: names with `(step, value)`, in their order."""
    run = launch(function, arguments, **{**SETTINGS, **settings})
    run.wait(110)
    found = {}
    for metric in run.view.metrics_since(0).items:
        found.setdefault(metric.name, []).append((metric.step, metric.value))
    return found


def shows(*bars):
    from tqdm import tqdm

    for label, numbers in bars:
        bar = tqdm(range(3), desc=label, mininterval=0)
        for number in bar:
            if isinstance(numbers, str):
                bar.set_postfix_str(numbers.format(number / 3))
            else:
                bar.set_postfix(dict.fromkeys(numbers, number / 3))
            # more than the pace at which a bar is sent
            time.sleep(0.1)


def test_numbers_beside_a_bar_are_metrics_over_all_epochs():
    found = metrics_of(shows, ("epoch 1", ["loss"]), ("epoch 2", ["loss"]))
    assert set(found) == {"loss"}
    # not the three digits that stand beside the bar
    assert {value for _, value in found["loss"]} == {0.0, 1 / 3, 2 / 3}
    steps = [step for step, _ in found["loss"]]
    assert steps == sorted(steps)
    assert 4 <= steps[-1] <= 6


@pytest.mark.slow
def test_numbers_in_a_text_beside_a_bar_are_metrics_and_other_bars_have_their_label():
    found = metrics_of(shows, ("train", "loss={0:.3f}, {0:.0%}, time=12:30"), ("val", "loss: {0:.3f}"))
    assert {value for _, value in found["loss"]} == {0.0, 0.333, 0.667}
    assert set(found) == {"loss", "val/loss"}


@pytest.mark.slow
def test_nothing_is_a_metric_that_was_not_logged_where_that_is_switched_off():
    assert metrics_of(shows, ("epoch 1", ["loss"]), autolog=False) == {}


def logs_and_shows():
    from tqdm import tqdm

    from accelerate_nb import Accelerator

    accelerator, bar = Accelerator(), tqdm(range(3), mininterval=0)
    for number in bar:
        accelerator.log({"loss": float(number)}, step=100 * number)
        bar.set_postfix(loss=number)
        time.sleep(0.1)


def test_a_number_that_is_logged_too_is_one_metric():
    assert metrics_of(logs_and_shows) == {"loss": [(0, 0.0), (100, 1.0), (200, 2.0)]}


def trains(folder):
    import torch
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x, labels=None):
            return {"loss": ((self.weight * x - labels) ** 2).mean(), "logits": self.weight * x}

    rows = [{"x": torch.ones(1), "labels": torch.zeros(1)}] * 16
    arguments = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=2, logging_steps=1, use_cpu=True, save_strategy="no",
        eval_strategy="steps", eval_steps=2, report_to=["tensorboard"],
    )  # fmt: skip
    os.environ["TENSORBOARD_LOGGING_DIR"] = f"{folder}/logs"
    Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows).train()


@pytest.mark.slow
def test_what_trainer_logs_are_metrics_once(tmp_path):
    found = metrics_of(trains, str(tmp_path))
    # TensorBoard gets the same names, from within
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4]
    assert [step for step, _ in found["eval/loss"]] == [2, 4]
    assert [value for _, value in found["epoch"]][:2] == [0.125, 0.25]
    assert {"train/grad_norm", "train/learning_rate", "train/train_runtime", "eval/runtime"} <= found.keys()
    assert {name for name in found if "/" not in name} == {"epoch"}


def writes(folder):
    from torch.utils.tensorboard import SummaryWriter

    from accelerate_nb import Accelerator

    with SummaryWriter(folder) as writer:
        for step in range(2):
            writer.add_scalar("written", step / 2, step)
    accelerator = Accelerator(log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("once")
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.get_tracker("tensorboard").log({"by its tracker": 2}, step=3)


def test_what_a_summary_writer_or_a_tracker_gets_is_a_metric_once(tmp_path):
    found = metrics_of(writes, str(tmp_path))
    assert found == {"written": [(0, 0.0), (1, 0.5)], "loss": [(1, 0.5)], "by its tracker": [(3, 2.0)]}


@pytest.fixture
def listener():
    sent = []
    connect(SimpleNamespace(rank=0, send=sent.append))
    yield sent
    connect(None)


# Methods with the parameters of the libraries' own.
COMET = {
    "log_metric": lambda self, name, value, step=None, epoch=None, include_context=True: None,
    "log_metrics": lambda self, dic, prefix=None, step=None, epoch=None, include_context=True: None,
}
AIM = {"track": lambda self, value, name=None, step=None, epoch=None, *, context=None: None}
CLEARML = {"report_scalar": lambda self, title, series, value, iteration: None}
DVCLIVE = {"log_metric": lambda self, name, val, timestamp=False, plot=True: None}
TRACKIO = {"log": lambda self, metrics, step=None: None}
SWANLAB = {"log": lambda self, data, step=None, print_to_console=False: None}
WANDB = {"log": lambda self, data, step=None, commit=None: (data, step, commit), "step": 7}
CONNECTOR = "pytorch_lightning.trainer.connectors.logger_connector.logger_connector"
LIGHTNING = {"log_metrics": lambda self, metrics, step=None: (metrics, step), "trainer": SimpleNamespace(global_step=9)}


@pytest.mark.parametrize(
    ("module", "doubles", "call", "sent"),
    [
        ("comet_ml.experiment", COMET, lambda made: made.log_metric("loss", 0.5), ("loss", 4, 0.5)),
        ("comet_ml.experiment", COMET, lambda made: made.log_metrics({"loss": 0.5}, "train", step=2), ("train_loss", 2, 0.5)),
        ("aim.sdk.run", AIM, lambda made: made.track(0.5, "loss", step=2, context={}), ("loss", 2, 0.5)),
        ("clearml.logger", CLEARML, lambda made: made.report_scalar("loss", "train", 0.5, iteration=2), ("loss/train", 2, 0.5)),
        ("dvclive.live", DVCLIVE, lambda made: made.log_metric("loss", 0.5), ("loss", 3, 0.5)),
        ("trackio.run", TRACKIO, lambda made: made.log({"loss": 0.5, "note": "text"}, step=2), ("loss", 2, 0.5)),
        ("swanlab.data.run.main", SWANLAB, lambda made: made.log({"loss": 0.5}, step=2), ("loss", 2, 0.5)),
        ("wandb.sdk.wandb_run", WANDB, lambda made: made.log({"loss": 0.5, "note": "text"}), ("loss", 7, 0.5)),
        ("wandb.sdk.wandb_run", WANDB, lambda made: made.log({"loss": 0.5}, step=2), ("loss", 2, 0.5)),
        (CONNECTOR, LIGHTNING, lambda made: made.log_metrics({"loss": 0.5, "note": "text"}), ("loss", 9, 0.5)),
        (CONNECTOR, LIGHTNING, lambda made: made.log_metrics({"loss": 0.5}, step=2), ("loss", 2, 0.5)),
    ],
)  # fmt: skip
def test_logs_of_other_libraries_are_metrics_and_do_what_they_did(module, doubles, call, sent, listener):
    (owner,) = {entry[1] for entry in logging_hooks._LOGS if entry[0] == module}
    library, names = ModuleType(module), {"step": 3, "curr_step": 4, **doubles}
    setattr(library, owner, type(owner, (), names))
    logging_hooks._report_calls_of(library)
    made = getattr(library, owner)()
    assert call(made) == call(type(owner, (), names)())
    with event_sink.log_call():
        call(made)
    assert [(event.name, event.step, event.value) for event in listener] == [sent]


def test_a_log_with_other_parameters_is_called_all_the_same(listener):
    library = ModuleType("trackio.run")
    library.Run = type("Run", (), {"log": lambda self, *things: things})
    logging_hooks._report_calls_of(library)
    assert library.Run().log({"loss": 0.5}) == ({"loss": 0.5},)
    assert listener == []
    # one that is no more is left alone
    logging_hooks._report_calls_of(ModuleType("wandb.sdk.wandb_run"))


def logs_to_mlflow(folder):
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    with mlflow.start_run():
        mlflow.log_metric("loss", 0.5)
        mlflow.log_metrics({"loss": 0.25, "accuracy": 0.75}, step=2)
        mlflow.log_params({"lr": 0.1})


@pytest.mark.slow
def test_what_mlflow_gets_are_metrics(tmp_path):
    pytest.importorskip("mlflow")
    found = metrics_of(logs_to_mlflow, str(tmp_path), timeout=110)
    assert found == {"loss": [(0, 0.5), (2, 0.25)], "accuracy": [(2, 0.75)]}
