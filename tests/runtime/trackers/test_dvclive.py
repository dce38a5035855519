"""DVCLive's files hold what Accelerate's hold."""

import csv

import pytest
import torch
import yaml

from tests.runtime.trackers.script import COURSES, SETTINGS, needs, records

pytestmark = needs("dvclive")


def read(folder):
    courses = {}
    for file in sorted((folder / "live" / "plots" / "metrics").rglob("*.tsv")):
        with file.open(newline="") as lines:
            courses[file.stem] = [(int(row["step"]), row[file.stem]) for row in csv.DictReader(lines, delimiter="\t")]
    return yaml.safe_load((folder / "live" / "params.yaml").read_text()), courses


def log_more(accelerator):
    accelerator.log({"note": "a text", "both": {"train": 1.0}})
    accelerator.log({"tensor": torch.tensor(2.5)}, step=7)


@pytest.mark.slow
def test_the_files_hold_what_accelerates_hold(tmp_path):
    init = {"dvclive": {"dir": "live", "save_dvc_exp": False, "dvcyaml": None}}
    theirs, ours = records("dvclive", tmp_path, read, init, log_more)
    assert ours[1].pop("tensor") == [(7, "2.5")]  # Accelerate leaves tensors out
    assert theirs == ours
    assert ours == (
        SETTINGS,
        {
            **{name: [(step, str(value)) for step, value in course] for name, course in COURSES.items()},
            "note": [(3, "a text")],
        },
    )
