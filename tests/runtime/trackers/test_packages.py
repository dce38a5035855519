"""What each package's own files hold after a training is what they hold after Accelerate's."""

import csv
import json
import os
import sqlite3
import struct
import zipfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.compat.packages import is_installed
from accelerate_nb.tracking import ClearMLTracker, MLflowTracker
from tests.peers import under_both

SETTINGS = {"lr": 0.1, "layers": 3, "name": "digits", "augment": True}
VALUES = [{"loss": 1 / (step + 1), "train_accuracy": step} for step in range(3)]
# What is to be read of them again: name to pairs of step and value.
COURSES = {name: [(step, values[name]) for step, values in enumerate(VALUES)] for name in ("loss", "train_accuracy")}


def needs(module: str) -> pytest.MarkDecorator:
    """A test that is skipped where a package is missing; the package is not imported, which some can't without a trace."""
    return pytest.mark.skipif(not is_installed(module), reason=f"{module} is not installed")


def train(peer, tracker, folder, init_kwargs=None, more=None):
    """Log `VALUES` with a tracker that keeps them below `folder`, in a place of the package's own; `more` logs more."""
    peer_folder = Path(folder, peer.name)
    peer_folder.mkdir(exist_ok=True)
    os.chdir(peer_folder)
    os.environ.update(
        WANDB_DIR=str(peer_folder),
        TRACKIO_DIR=str(peer_folder / "trackio"),
        COMET_OFFLINE_DIRECTORY=str(peer_folder / "comet"),
        CLEARML_CACHE_DIR=str(peer_folder / "clearml"),
        MLFLOW_TRACKING_URI=(peer_folder / "mlruns").as_uri(),
    )
    accelerator = peer.Accelerator(log_with=tracker, project_dir=str(peer_folder))
    accelerator.init_trackers("digits", dict(SETTINGS), init_kwargs)
    for step, values in enumerate(VALUES):
        accelerator.log(dict(values), step=step)
    if more is not None:
        more(accelerator)
    # with Accelerate a rank that ends first would take the group from one that still connects
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return len(accelerator.trackers)


def records(tracker, folder, read, init_kwargs=None, more=None):
    """What `read` finds in the places of Accelerate's and of our training on two processes, of which the first keeps a record."""
    both = under_both(train, 2, tracker, str(folder), init_kwargs, more)
    assert both.theirs == both.ours == [1, 0]
    return read(folder / "accelerate"), read(folder / "accelerate_nb")


def read_tensorboard(base):
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
            found[f"{folder} {name}"] = [(text.step, [*text.tensor_proto.string_val]) for text in events.Tensors(name)]
        for name in events.Tags()["images"]:
            found[f"{folder} {name}"] = [(event.step, event.width, event.height) for event in events.Images(name)]
        for name, content in events.summary_metadata.items():
            if content.plugin_data.plugin_name == "hparams":
                data = plugin_data_pb2.HParamsPluginData.FromString(content.plugin_data.content)
                shown = data.session_start_info.hparams.items()
                found[f"hparams {name}"] = {name: str(value).strip() for name, value in shown}
    return found


def log_to_tensorboard(accelerator):
    numbers = {"tensor": torch.tensor(2.5), "numpy": np.float32(0.5), "int": np.int64(4)}
    accelerator.log({"note": "a text", **numbers}, step=3)
    both, kwargs = {"train": 1.0, "eval": torch.tensor(2.0)}, {"tensorboard": {"walltime": 5}}
    accelerator.log({"both": both}, step=4, log_kwargs=kwargs)
    accelerator.log({"loss": float("nan"), "largest": float("inf"), "counted": 7})
    pictures = np.zeros((2, 3, 4, 5), dtype=np.uint8)
    if accelerator.is_main_process:
        accelerator.get_tracker("tensorboard").log_images({"pictures": pictures}, step=1)


@needs("tensorboard")
def test_the_files_of_tensorboard_hold_what_accelerates_hold(tmp_path):
    theirs, ours = records("tensorboard", tmp_path, read_tensorboard, more=log_to_tensorboard)
    assert (ours.pop(" numpy"), ours.pop(" int")) == ([(3, 0.5)], [(3, 4.0)])  # Accelerate leaves numpy's numbers out
    assert repr(theirs) == repr(ours)  # as text: nan is not itself
    assert ours["settings"] == [SETTINGS]
    assert ours[" train_accuracy"] == COURSES["train_accuracy"]
    assert ours[" tensor"] == [(3, 2.5)]
    assert ours["both_eval both"] == [(4, 2.0)]
    assert ours[" note/text_summary"] == [(3, [b"a text"])]
    assert ours["hparams _hparams_/session_start_info"]["lr"] == "number_value: 0.1"


@needs("tensorboard")
def test_settings_and_values_of_any_kind_stop_nothing(tmp_path):
    from PIL import Image

    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path, cpu=True)
    settings = {"path": Path("a"), "none": None, "sizes": (1, 2), "inner": {"dtype": torch.float16, 1: torch.tensor(3)}}
    accelerator.init_trackers("digits", settings)
    chart = {"a": 1, "b": "text", "c": {"d": 2}}
    accelerator.log({"list": [1, 2], "none": None, "chart": chart, "one": torch.ones(1)}, step=0)
    accelerator.get_tracker("tensorboard").log_images({"pictures": [Image.new("L", (5, 4))] * 2}, step=0)
    accelerator.end_training()
    found = read_tensorboard(tmp_path)
    inner = {"dtype": "torch.float16", "1": 3}
    assert found["settings"] == [{"path": "a", "none": None, "sizes": [1, 2], "inner": inner}]
    assert found["hparams _hparams_/session_start_info"]["inner/dtype"] == 'string_value: "torch.float16"'
    assert found[" one"] == [(0, 1.0)]
    assert found["chart_c/d chart"] == [(0, 2.0)]
    assert found[" pictures"] == [(0, 10, 4)]  # side by side


HEADER, BLOCK = 7, 32768  # of wandb's file


def wandb_records(data):
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


def read_wandb(folder):
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    config, courses = {}, {}
    for part in wandb_records(file.read_bytes()):
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


def log_to_wandb(accelerator):
    accelerator.log({"note": "a text", "tensor": torch.tensor(2.5), "numpy": np.float32(0.5)}, step=3)
    accelerator.log({"both": {"train": 1.0, "eval": torch.tensor(2.0)}}, step=4)
    if accelerator.is_main_process:
        tracker = accelerator.get_tracker("wandb")
        tracker.log_table("table", columns=["a", "b"], data=[[1, 2]], step=5)
        tracker.log_images({"pictures": [np.zeros((4, 5, 3), dtype=np.uint8)]}, step=6)
        assert accelerator.get_tracker("wandb", unwrap=True) is tracker.run


@needs("wandb")
@pytest.mark.slow
def test_the_run_of_wandb_holds_what_accelerates_holds(tmp_path):
    init = {"wandb": {"tags": ["first"], "settings": {"disable_git": True}}}
    theirs, ours = records("wandb", tmp_path, read_wandb, init, log_to_wandb)
    assert theirs == ours
    settings, courses, drawn, last_record = ours
    assert (settings, last_record) == (SETTINGS, "exit")
    assert {"table/path", "pictures/filenames"} <= set(drawn)
    assert {name: courses[name] for name in COURSES} == COURSES
    assert courses["both/eval"] == [(4, 2)]
    assert courses["note"] == [(3, "a text")]


def read_comet(folder):
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


def log_to_comet(accelerator):
    accelerator.log({"note": "a text", "both": 1, "inner": {"train": 1.0}}, step=3)
    accelerator.log({"tensor": torch.tensor(2.5)}, step=4)


@needs("comet_ml")
@pytest.mark.slow
def test_the_archive_of_comet_holds_what_accelerates_holds(tmp_path):
    theirs, ours = records("comet_ml", tmp_path, read_comet, {"comet_ml": {"online": False}}, log_to_comet)
    assert ours[1].pop("tensor") == [(4, 2.5)]  # Accelerate leaves tensors out
    assert theirs == ours
    settings, courses, _ = ours
    assert settings == {**SETTINGS, "curr_step": 4}  # the last one is Comet's own
    assert courses == {**COURSES, "both": [(3, 1)], "train": [(3, 1.0)]}


def read_aim(folder):
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


def log_to_aim(accelerator):
    accelerator.log({"tensor": torch.tensor(2.5)}, step=4)
    if type(accelerator).__module__.startswith("accelerate_nb"):  # Aim refuses these from Accelerate
        accelerator.log({"note": "a text", "inner": {"train": 1.0}}, step=5)
    if accelerator.is_main_process:
        picture = np.zeros((4, 5, 3), dtype=np.uint8)
        images = {"first": (picture, "a caption"), "second": picture}
        accelerator.get_tracker("aim").log_images(images, step=1, kwargs={"track": {"context": {"subset": "train"}}})


@needs("aim")
@pytest.mark.slow
def test_the_repository_of_aim_holds_what_accelerates_holds(tmp_path):
    theirs, ours = records("aim", tmp_path, read_aim, {"aim": {"system_tracking_interval": None}}, log_to_aim)
    assert ours[2].pop("inner/train") == [(5, 1.0)]
    assert theirs == ours
    name, settings, courses, pictures = ours
    assert (name, settings) == ("digits", SETTINGS)
    assert courses == {**COURSES, "tensor": [(4, 2.5)]}
    assert pictures == ["first", "second"]


def read_mlflow(folder):
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


def log_to_mlflow(accelerator):
    accelerator.log({"note": "a text", "both": {"train": 1.0}, "more": 3}, step=3)
    accelerator.log({"tensor": torch.tensor(2.5)}, step=4)
    if accelerator.is_main_process:
        tracker = accelerator.get_tracker("mlflow")
        tracker.store_init_configuration({"long": "x" * 100_000, "many": "a setting more"})
        Path("notes").mkdir()
        Path("notes", "a.txt").write_text("kept")
        tracker.log_artifact("notes/a.txt")
        tracker.log_artifacts("notes", "folder")


@needs("mlflow")
@pytest.mark.slow
def test_the_run_of_mlflow_holds_what_accelerates_holds(tmp_path):
    init = {"mlflow": {"tags": {"first": "yes"}, "run_name": "one"}}
    theirs, ours = records("mlflow", tmp_path, read_mlflow, init, log_to_mlflow)
    assert ours[1].pop("tensor") == [(4, 2.5)]  # Accelerate leaves tensors out
    assert theirs == ours
    parameters, courses, tags, name, status, artifacts = ours
    assert parameters == {**{key: str(value) for key, value in SETTINGS.items()}, "many": "a setting more"}
    assert courses == {**COURSES, "more": [(3, 3)]}
    assert (tags, name, status, artifacts) == ({"first": "yes"}, "one", "FINISHED", ["a.txt", "folder"])


@needs("mlflow")
def test_variables_of_mlflow_go_before_arguments(monkeypatch):
    for name, value in {"EXPERIMENT_NAME": "other", "RUN_ID": "7", "TAGS": '{"a": "b"}', "NESTED_RUN": "yes"}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    tracker = MLflowTracker("digits", run_id="1", tags={"c": "d"})
    found = tracker.experiment_name, tracker.run_id, tracker.tags, tracker.nested_run
    assert found == ("other", "7", {"a": "b"}, True)
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "perhaps")
    with pytest.raises(ConfigurationError, match="MLFLOW_NESTED_RUN is 'perhaps'"):
        MLflowTracker("digits")


def read_clearml(folder):
    (run_folder,) = (path for path in (folder / "clearml" / "offline").iterdir() if path.is_dir())
    task = json.loads((run_folder / "task.json").read_text())
    courses = {}
    for line in (run_folder / "metrics.jsonl").read_text().splitlines():
        for event in json.loads(line):
            if "value" in event and not event["metric"].startswith(":monitor"):
                courses.setdefault((event["metric"], event["variant"]), []).append((event["iter"], event["value"]))
    return task["project_name"], task["name"], task["configuration"]["General"]["value"], courses


def log_to_clearml(accelerator):
    accelerator.log({"note": "a text", "eval_loss": 3}, step=3)
    accelerator.log({"tensor": torch.tensor(2.5)}, step=4)


@needs("clearml")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_folder_of_clearml_holds_what_accelerates_holds(tmp_path):
    init = {"clearml": {"auto_resource_monitoring": False, "auto_connect_frameworks": {"detect_repository": False}}}
    theirs, ours = records("clearml", tmp_path, read_clearml, init, log_to_clearml)
    assert ours[3].pop(("tensor", "train")) == [(4, 2.5)]  # Accelerate leaves tensors out
    assert theirs == ours
    project, task, settings, courses = ours
    assert (project, task) == ("digits", "digits")
    assert all(f"{name} = " in settings for name in SETTINGS)
    assert courses[("loss", "train")] == COURSES["loss"]
    assert courses[("accuracy", "train")] == COURSES["train_accuracy"]
    assert courses[("loss", "eval")] == [(3, 3)]


@needs("clearml")
def test_a_table_without_content_is_an_error():
    with pytest.raises(ConfigurationError, match="neither `data` nor `dataframe`"):
        ClearMLTracker("digits").log_table("empty")


def read_dvclive(folder):
    courses = {}
    for file in sorted((folder / "live" / "plots" / "metrics").rglob("*.tsv")):
        with file.open(newline="") as lines:
            courses[file.stem] = [(int(row["step"]), row[file.stem]) for row in csv.DictReader(lines, delimiter="\t")]
    return yaml.safe_load((folder / "live" / "params.yaml").read_text()), courses


def log_to_dvclive(accelerator):
    accelerator.log({"note": "a text", "both": {"train": 1.0}})
    accelerator.log({"tensor": torch.tensor(2.5)}, step=7)


@needs("dvclive")
@pytest.mark.slow
def test_the_files_of_dvclive_hold_what_accelerates_hold(tmp_path):
    init = {"dvclive": {"dir": "live", "save_dvc_exp": False, "dvcyaml": None}}
    theirs, ours = records("dvclive", tmp_path, read_dvclive, init, log_to_dvclive)
    assert ours[1].pop("tensor") == [(7, "2.5")]  # Accelerate leaves tensors out
    courses = {name: [(step, str(value)) for step, value in course] for name, course in COURSES.items()}
    assert theirs == ours == (SETTINGS, {**courses, "note": [(3, "a text")]})


def read_swanlab(folder):
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


def log_to_swanlab(accelerator):
    accelerator.log({"tensor": torch.tensor(2.5), "both": {"train": 1.0, "eval": 2}}, step=3)


@needs("swanlab")
@pytest.mark.slow
def test_the_file_of_swanlab_holds_what_accelerates_holds(tmp_path):
    theirs, ours = records("swanlab", tmp_path, read_swanlab, {"swanlab": {"mode": "offline"}}, log_to_swanlab)
    # what Accelerate's call for wandb leaves in SwanLab's settings, and its own sign
    assert theirs[0].pop("allow_val_change") is True
    theirs[0].pop("FRAMEWORK")
    more = {"tensor": [(3, 2.5)], "both/train": [(3, 1.0)], "both/eval": [(3, 2)]}
    assert theirs == ours == (SETTINGS, {**COURSES, **more})


def read_trackio(folder):
    with closing(sqlite3.connect(folder / "trackio" / "digits.db")) as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    courses = {}
    for step, values in rows:
        for name, value in json.loads(values).items():
            courses.setdefault(name, []).append((step, value))
    return {name: value for name, value in json.loads(config).items() if not name.startswith("_")}, courses


def log_to_trackio(accelerator):
    accelerator.log({"note": "a text", "both": {"train": 1.0, "eval": 2}, "nan": float("nan")}, step=3)
    if accelerator.is_main_process and type(accelerator).__module__.startswith("accelerate_nb"):
        accelerator.log({"tensor": torch.tensor(2.5)}, step=4)


@needs("trackio")
def test_the_database_of_trackio_holds_what_accelerates_holds(tmp_path):
    init = {"trackio": {"auto_log_gpu": False}}
    theirs, ours = records("trackio", tmp_path, read_trackio, init, log_to_trackio)
    # Accelerate's call for wandb, `update(..., allow_val_change=True)`, is one more setting to a plain dictionary
    assert theirs[0] == {**SETTINGS, "allow_val_change": True}
    assert ours[0] == SETTINGS
    assert ours[1].pop("tensor") == [(4, 2.5)]
    assert theirs[1] == ours[1]
    assert {name: ours[1][name] for name in COURSES} == COURSES
    assert ours[1]["both"] == [(3, {"train": 1.0, "eval": 2})]
