"""TensorBoard's files hold what Accelerate's hold."""

from pathlib import Path

import numpy as np
import torch
import yaml

from accelerate_nb import Accelerator
from tests.runtime.trackers.script import COURSES, SETTINGS, needs, records

pytestmark = needs("tensorboard")


def read(base):
    """Every event of all files, by the names that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    run = base / "digits"
    found = {"settings": [yaml.safe_load(file.read_text()) for file in run.glob("*/hparams.yml")]}
    for file in sorted(run.rglob("events.*")):
        events = EventAccumulator(str(file), size_guidance={"images": 0}).Reload()
        # folders of hyperparameters are called after the time
        folder = "" if file.parent.name[0].isdigit() else str(file.parent.relative_to(run)).strip(".")
        for name in events.Tags()["scalars"]:
            found[f"{folder} {name}"] = [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["tensors"]:
            found[f"{folder} {name}"] = [
                (event.step, list(event.tensor_proto.string_val)) for event in events.Tensors(name)
            ]
        for name in events.Tags()["images"]:
            found[f"{folder} {name}"] = [(event.step, event.width, event.height) for event in events.Images(name)]
        for name, content in events.summary_metadata.items():
            if content.plugin_data.plugin_name == "hparams":
                found[f"hparams {name}"] = hyperparameters(plugin_data_pb2, content.plugin_data.content)
    return found


def hyperparameters(protocol, content):
    data = protocol.HParamsPluginData.FromString(content)
    return {name: str(value).strip() for name, value in data.session_start_info.hparams.items()}


def log_more(accelerator):
    accelerator.log(
        {"note": "a text", "tensor": torch.tensor(2.5), "numpy": np.float32(0.5), "int": np.int64(4)}, step=3
    )
    accelerator.log(
        {"both": {"train": 1.0, "eval": torch.tensor(2.0)}}, step=4, log_kwargs={"tensorboard": {"walltime": 5}}
    )
    accelerator.log({"loss": float("nan"), "largest": float("inf"), "counted": 7})
    pictures = np.zeros((2, 3, 4, 5), dtype=np.uint8)
    accelerator.get_tracker("tensorboard").log_images(
        {"pictures": pictures}, step=1
    ) if accelerator.is_main_process else None


def test_the_files_hold_what_accelerates_hold(tmp_path):
    theirs, ours = records("tensorboard", tmp_path, read, more=log_more)
    assert (ours.pop(" numpy"), ours.pop(" int")) == ([(3, 0.5)], [(3, 4.0)])  # Accelerate leaves numpy's numbers out
    assert repr(theirs) == repr(ours)  # as text: nan is not itself
    assert ours["settings"] == [SETTINGS]
    assert ours[" train_accuracy"] == COURSES["train_accuracy"]
    assert ours[" tensor"] == [(3, 2.5)]
    assert ours["both_eval both"] == [(4, 2.0)]
    assert ours[" note/text_summary"] == [(3, [b"a text"])]
    assert ours["hparams _hparams_/session_start_info"]["lr"] == "number_value: 0.1"


def test_settings_and_values_of_any_kind_stop_nothing(tmp_path):
    from PIL import Image

    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path, cpu=True)
    settings = {"path": Path("a"), "none": None, "sizes": (1, 2), "inner": {"dtype": torch.float16, 1: torch.tensor(3)}}
    accelerator.init_trackers("digits", settings)
    accelerator.log(
        {"list": [1, 2], "none": None, "chart": {"a": 1, "b": "text", "c": {"d": 2}}, "one": torch.ones(1)}, step=0
    )
    accelerator.get_tracker("tensorboard").log_images({"pictures": [Image.new("L", (5, 4))] * 2}, step=0)
    accelerator.end_training()
    found = read(tmp_path)
    assert found["settings"] == [
        {"path": "a", "none": None, "sizes": [1, 2], "inner": {"dtype": "torch.float16", "1": 3}}
    ]
    assert found["hparams _hparams_/session_start_info"]["inner/dtype"] == 'string_value: "torch.float16"'
    assert found[" one"] == [(0, 1.0)]
    assert found["chart_c/d chart"] == [(0, 2.0)]
    assert found[" pictures"] == [(0, 10, 4)]  # side by side
