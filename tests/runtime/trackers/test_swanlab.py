"""SwanLab's offline file holds what Accelerate's holds."""

import pytest
import torch
import yaml

from tests.runtime.trackers.script import COURSES, SETTINGS, needs, records

pytestmark = needs("swanlab")


def read(folder):
    from swanlab.proto.swanlab.record.v1 import record_pb2
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (file,) = folder.glob("swanlog/run-*/run-*.swanlab")
    reader = DataStoreReader()
    reader.open(file)
    courses = {}
    for data in reader:
        record = record_pb2.Record.FromString(data)
        if record.HasField("scalar"):
            courses.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
    reader.close()
    config = yaml.safe_load((file.parent / "files" / "config.yaml").read_text())
    return {name: entry["value"] for name, entry in config.items()}, courses


def log_more(accelerator):
    accelerator.log({"tensor": torch.tensor(2.5), "both": {"train": 1.0, "eval": 2}}, step=3)


@pytest.mark.slow
def test_the_file_holds_what_accelerates_holds(tmp_path):
    theirs, ours = records("swanlab", tmp_path, read, {"swanlab": {"mode": "offline"}}, log_more)
    # what Accelerate's call for wandb leaves in SwanLab's settings, and its own sign
    assert theirs[0].pop("allow_val_change") is True
    theirs[0].pop("FRAMEWORK")
    assert theirs == ours
    assert ours == (
        SETTINGS,
        {**COURSES, "tensor": [(3, 2.5)], "both/train": [(3, 1.0)], "both/eval": [(3, 2)]},
    )
