"""Before a launch takes an accelerator that a detached run holds, it names the run."""

from __future__ import annotations

import pytest

from accelerate_nb.events.run_folder import RunRecorder, hold_lock, new_folder
from accelerate_nb.launching.planning.placement import Placement, devices_of, taken


@pytest.mark.parametrize(
    ("kind", "shows", "environment", "devices"),
    [
        ("cpu", {}, {}, ()),
        ("cuda", {}, {}, ("cuda:0", "cuda:1")),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "2,3"}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ("cuda:2", "cuda:3")),
        ("cuda", {}, {"CUDA_VISIBLE_DEVICES": "5,6,7"}, ("cuda:5", "cuda:6")),
        ("mps", {}, {}, ("mps:0", "mps:1")),
    ],
)
def test_the_devices_of_a_placement_are_named_as_the_machine_counts_them(kind, shows, environment, devices):
    assert devices_of(Placement("supervisor", 2, kind == "cpu", "", shows, kind=kind), environment) == devices


def keep(parent, name, **facts):
    folder = new_folder(parent, name)
    with RunRecorder(folder) as record:
        status = {"name": name, "state": "running", "started": 1.0, "ranks": 2, "detached": True, "devices": ["cuda:1"]}
        record.status(**{**status, **facts})
    return folder


def test_a_run_that_holds_a_device_is_named_and_one_that_is_over_or_elsewhere_is_not(tmp_path):
    held = keep(tmp_path, "holds")
    hold_lock(held)
    keep(tmp_path, "over", state="finished")
    keep(tmp_path, "lost")
    other = keep(tmp_path, "other_devices", devices=["cuda:7"])
    hold_lock(other)
    [text] = taken(["cuda:0", "cuda:1"], tmp_path)
    assert "cuda:1 is taken by the detached run 'holds'" in text
    assert str(held) in text
    assert list(taken(["cuda:0"], tmp_path)) == []
