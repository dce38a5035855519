"""A run of MLflow holds what Accelerate's holds."""

from pathlib import Path

import pytest
import torch

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.tracking import MLflowTracker
from tests.runtime.trackers.script import COURSES, SETTINGS, needs, records

pytestmark = needs("mlflow")


def read(folder):
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    courses = {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    tags = {name: value for name, value in run.data.tags.items() if not name.startswith("mlflow.")}
    artifacts = [list_artifact.path for list_artifact in client.list_artifacts(run.info.run_id)]
    return run.data.params, courses, tags, run.info.run_name, run.info.status, artifacts


def log_more(accelerator):
    accelerator.log({"note": "a text", "both": {"train": 1.0}, "more": 3}, step=3)
    accelerator.log({"tensor": torch.tensor(2.5)}, step=4)
    if accelerator.is_main_process:
        tracker = accelerator.get_tracker("mlflow")
        tracker.store_init_configuration({"long": "x" * 100_000, "many": "a setting more"})
        Path("notes").mkdir()
        Path("notes", "a.txt").write_text("kept")
        tracker.log_artifact("notes/a.txt")
        tracker.log_artifacts("notes", "folder")


@pytest.mark.slow
def test_the_run_holds_what_accelerates_holds(tmp_path):
    init = {"mlflow": {"tags": {"first": "yes"}, "run_name": "one"}}
    theirs, ours = records("mlflow", tmp_path, read, init, log_more)
    assert ours[1].pop("tensor") == [(4, 2.5)]  # Accelerate leaves tensors out
    assert theirs == ours
    parameters, courses, tags, name, status, artifacts = ours
    assert parameters == {**{key: str(value) for key, value in SETTINGS.items()}, "many": "a setting more"}
    assert courses == {**COURSES, "more": [(3, 3)]}
    assert (tags, name, status, artifacts) == ({"first": "yes"}, "one", "FINISHED", ["a.txt", "folder"])


def test_variables_go_before_arguments(monkeypatch):
    for name, value in {"EXPERIMENT_NAME": "other", "RUN_ID": "7", "TAGS": '{"a": "b"}', "NESTED_RUN": "yes"}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    tracker = MLflowTracker("digits", run_id="1", tags={"c": "d"})
    assert (tracker.experiment_name, tracker.run_id, tracker.tags, tracker.nested_run) == (
        "other",
        "7",
        {"a": "b"},
        True,
    )
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "perhaps")
    with pytest.raises(ConfigurationError, match="MLFLOW_NESTED_RUN is 'perhaps'"):
        MLflowTracker("digits")
