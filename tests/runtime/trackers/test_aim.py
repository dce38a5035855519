"""Aim's repository holds what Accelerate's holds."""

import numpy as np
import pytest
import torch

from tests.runtime.trackers.script import COURSES, SETTINGS, needs, records

pytestmark = needs("aim")


def read(folder):
    from aim import Repo, Run

    (name,) = Repo(str(folder)).list_all_runs()
    # opened as if it were to go on: only then does Aim look at what is not in its index yet
    run = Run(name, repo=str(folder), system_tracking_interval=None)
    courses = {}
    for metric in run.metrics():
        frame = metric.dataframe()
        courses[metric.name] = [(int(step), value) for step, value in zip(frame["step"], frame["value"], strict=True)]
    pictures = sorted(item["name"] for item in run.collect_sequence_info("images", skip_last_value=True)["images"])
    found = run.name, dict(run["hparams"]), courses, pictures
    run.close()
    return found


def log_more(accelerator):
    accelerator.log({"tensor": torch.tensor(2.5)}, step=4)
    if type(accelerator).__module__.startswith("accelerate_nb"):  # Aim refuses these from Accelerate
        accelerator.log({"note": "a text", "inner": {"train": 1.0}}, step=5)
    if accelerator.is_main_process:
        picture = np.zeros((4, 5, 3), dtype=np.uint8)
        images = {"first": (picture, "a caption"), "second": picture}
        accelerator.get_tracker("aim").log_images(images, step=1, kwargs={"track": {"context": {"subset": "train"}}})


@pytest.mark.slow
def test_the_repository_holds_what_accelerates_holds(tmp_path):
    theirs, ours = records("aim", tmp_path, read, {"aim": {"system_tracking_interval": None}}, log_more)
    assert ours[2].pop("inner/train") == [(5, 1.0)]
    assert theirs == ours
    name, settings, courses, pictures = ours
    assert (name, settings) == ("digits", SETTINGS)
    assert courses == {**COURSES, "tensor": [(4, 2.5)]}
    assert pictures == ["first", "second"]
