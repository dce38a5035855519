"""Comet's offline archive holds what Accelerate's holds."""

import json
import zipfile

import pytest
import torch

from tests.runtime.trackers.script import COURSES, SETTINGS, needs, records

pytestmark = needs("comet_ml")


def read(folder):
    (archive,) = (folder / "comet").glob("*.zip")
    with zipfile.ZipFile(archive) as content:
        messages = [json.loads(line) for line in content.read("messages.json").splitlines()]
    settings, courses, others = {}, {}, {}
    for payload in (message["payload"] for message in messages):
        if (parameter := payload.get("param")) and parameter["source"] == "manual":
            settings[parameter["paramName"]] = parameter["paramValue"]
        if (metric := payload.get("metric")) and not metric["metricName"].startswith("sys."):
            courses.setdefault(metric["metricName"], []).append((metric["step"], metric["metricValue"]))
        if "key" in payload and payload["key"] == "note":
            others[payload["key"]] = payload.get("value", payload.get("val"))
    return settings, courses, others


def log_more(accelerator):
    accelerator.log({"note": "a text", "both": 1, "inner": {"train": 1.0}}, step=3)
    accelerator.log({"tensor": torch.tensor(2.5)}, step=4)


@pytest.mark.slow
def test_the_archive_holds_what_accelerates_holds(tmp_path):
    theirs, ours = records("comet_ml", tmp_path, read, {"comet_ml": {"online": False}}, log_more)
    assert ours[1].pop("tensor") == [(4, 2.5)]  # Accelerate leaves tensors out
    assert theirs == ours
    settings, courses, _ = ours
    assert settings == {**SETTINGS, "curr_step": 4}  # the last one is Comet's own
    assert courses == {**COURSES, "both": [(3, 1)], "train": [(3, 1.0)]}
