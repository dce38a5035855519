"""A run of wandb holds what Accelerate's holds."""

import json
import struct

import numpy as np
import pytest
import torch

from tests.runtime.trackers.script import COURSES, SETTINGS, needs, records

pytestmark = needs("wandb")

HEADER, BLOCK = 7, 32768


def parts(data):
    """The records of a `.wandb` file, which is a log of LevelDB's form behind a header."""
    at, record = HEADER, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, length, record_type = struct.unpack("<IHB", data[at : at + HEADER])
        record += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if record_type in (1, 4):  # whole, or its last part
            yield record
            record = b""


def read(folder):
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    config, courses = {}, {}
    for part in parts(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(part)
        for item in [*record.config.update, *record.run.config.update]:
            config[item.key] = json.loads(item.value_json)
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            courses.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
    settings = {name: value for name, value in config.items() if name != "_wandb"}
    # names of files are drawn by lot
    drawn = sorted(name for name in courses if name.endswith(("path", "sha256", "filenames")))
    kept = {name: course for name, course in courses.items() if not name.startswith("_") and name not in drawn}
    return settings, kept, drawn, record.WhichOneof("record_type")


def log_more(accelerator):
    accelerator.log({"note": "a text", "tensor": torch.tensor(2.5), "numpy": np.float32(0.5)}, step=3)
    accelerator.log({"both": {"train": 1.0, "eval": torch.tensor(2.0)}}, step=4)
    if accelerator.is_main_process:
        tracker = accelerator.get_tracker("wandb")
        tracker.log_table("table", columns=["a", "b"], data=[[1, 2]], step=5)
        tracker.log_images({"pictures": [np.zeros((4, 5, 3), dtype=np.uint8)]}, step=6)
        assert accelerator.get_tracker("wandb", unwrap=True) is tracker.run


@pytest.mark.slow
def test_the_run_holds_what_accelerates_holds(tmp_path):
    init = {"wandb": {"tags": ["first"], "settings": {"disable_git": True}}}
    theirs, ours = records("wandb", tmp_path, read, init, log_more)
    assert theirs == ours
    settings, courses, drawn, last_record = ours
    assert (settings, last_record) == (SETTINGS, "exit")
    assert {"table/path", "pictures/filenames"} <= set(drawn)
    assert {name: courses[name] for name in COURSES} == COURSES
    assert courses["both/eval"] == [(4, 2)]
    assert courses["note"] == [(3, "a text")]
