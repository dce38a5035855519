"""Trackio's database holds what Accelerate's holds."""

import json
import sqlite3
from contextlib import closing

import torch

from tests.runtime.trackers.script import COURSES, SETTINGS, needs, records

pytestmark = needs("trackio")


def read(folder):
    with closing(sqlite3.connect(folder / "trackio" / "digits.db")) as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    courses = {}
    for step, values in rows:
        for name, value in json.loads(values).items():
            courses.setdefault(name, []).append((step, value))
    return {name: value for name, value in json.loads(config).items() if not name.startswith("_")}, courses


def log_more(accelerator):
    accelerator.log({"note": "a text", "both": {"train": 1.0, "eval": 2}, "nan": float("nan")}, step=3)
    if accelerator.is_main_process and type(accelerator).__module__.startswith("accelerate_nb"):
        accelerator.log({"tensor": torch.tensor(2.5)}, step=4)


def test_the_database_holds_what_accelerates_holds(tmp_path):
    init = {"trackio": {"auto_log_gpu": False}}
    theirs, ours = records("trackio", tmp_path, read, init, log_more)
    # Accelerate's call for wandb, `update(..., allow_val_change=True)`, is one more setting to a plain dictionary
    assert theirs[0] == {**SETTINGS, "allow_val_change": True}
    assert ours[0] == SETTINGS
    assert ours[1].pop("tensor") == [(4, 2.5)]
    assert theirs[1] == ours[1]
    assert {name: ours[1][name] for name in COURSES} == COURSES
    assert ours[1]["both"] == [(3, {"train": 1.0, "eval": 2})]
