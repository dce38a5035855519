"""ClearML's offline folder holds what Accelerate's holds."""

import json

import pytest
import torch

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.tracking import ClearMLTracker
from tests.runtime.trackers.script import COURSES, SETTINGS, needs, records

pytestmark = needs("clearml")


def read(folder):
    (run_folder,) = (path for path in (folder / "clearml" / "offline").iterdir() if path.is_dir())
    task = json.loads((run_folder / "task.json").read_text())
    courses = {}
    for line in (run_folder / "metrics.jsonl").read_text().splitlines():
        for event in json.loads(line):
            if "value" in event and not event["metric"].startswith(":monitor"):
                courses.setdefault((event["metric"], event["variant"]), []).append((event["iter"], event["value"]))
    return task["project_name"], task["name"], task["configuration"]["General"]["value"], courses


def log_more(accelerator):
    accelerator.log({"note": "a text", "eval_loss": 3}, step=3)
    accelerator.log({"tensor": torch.tensor(2.5)}, step=4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_folder_holds_what_accelerates_holds(tmp_path):
    init = {"clearml": {"auto_resource_monitoring": False, "auto_connect_frameworks": {"detect_repository": False}}}
    theirs, ours = records("clearml", tmp_path, read, init, log_more)
    assert ours[3].pop(("tensor", "train")) == [(4, 2.5)]  # Accelerate leaves tensors out
    assert theirs == ours
    project, task, settings, courses = ours
    assert (project, task) == ("digits", "digits")
    assert all(f"{name} = " in settings for name in SETTINGS)
    assert courses[("loss", "train")] == COURSES["loss"]
    assert courses[("accuracy", "train")] == COURSES["train_accuracy"]
    assert courses[("loss", "eval")] == [(3, 3)]


def test_a_table_without_content_is_an_error():
    with pytest.raises(ConfigurationError, match="neither `data` nor `dataframe`"):
        ClearMLTracker("digits").log_table("empty")
