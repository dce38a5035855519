"""`accelerate-nb env` tells what a bug report needs, and no secret."""

import json
import os
import platform
import shlex
import sys
from importlib.metadata import version

import pexpect
import psutil
import pytest
import torch

from accelerate_nb.cli.commands.env import gather, variables
from accelerate_nb.cli.main import main
from accelerate_nb.devices import tpu_info, xla
from tests.processes import python

KEYS = {
    *("accelerate_nb", "python", "torch", "devices", "machine", "notebook"),
    *("libraries", "environment", "configuration", "supervisors", "runs"),
}


@pytest.fixture(autouse=True)
def _nothing_of_the_person(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("HF_") and name != "HF_HOME"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def environment_report(capsys, *words) -> dict:
    assert main(["env", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_is_printed_is_true(capsys, tmp_path):
    facts = environment_report(capsys)
    assert facts.keys() == KEYS
    assert facts["python"]["version"] == platform.python_version()
    assert facts["torch"]["version"] == torch.__version__
    assert facts["torch"]["built_for"] == (["cuda"] if torch.version.cuda else ["cpu"])
    assert facts["libraries"]["transformers"] == version("transformers")
    assert facts["notebook"]["ipykernel"] == version("ipykernel")
    assert facts["devices"]["count"] == torch.accelerator.device_count()
    assert 0 < facts["machine"]["free_memory_gib"] <= facts["machine"]["memory_gib"]
    assert facts["machine"]["processor"]
    assert facts["runs"]["folder"] == str(tmp_path / "cache" / "accelerate_nb_runs")
    assert facts["runs"]["free_gib"] > 0


def test_the_text_holds_the_same_facts(capsys):
    facts = environment_report(capsys)
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    for fact in (facts["torch"]["version"], facts["python"]["platform"], facts["runs"]["folder"]):
        assert fact in text
    headings = [line[4:] for line in text.splitlines() if line.startswith("### ")]
    assert headings == [name if name == "accelerate_nb" else name.replace("_", " ") for name in facts]


@pytest.mark.slow
def test_torch_is_imported_only_where_it_is_requested():
    code = "import sys; from accelerate_nb.cli.main import main; main(['env', *{}]); print('torch' in sys.modules)"
    for words, imported in ((["--json"], "False"), (["--torch", "--json"], "True")):
        report, _, last = python("-c", code.format(words), check=True).stdout.strip().rpartition("\n")
        assert last == imported
        assert ("torch_build" in json.loads(report)) == (imported == "True")


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "JUPYTER_TOKEN", "ACCELERATE_API_KEY", "ACCELERATE_NB_PASSWORD", "HF_CLIENT_SECRET", "TORCH_AUTH"],
)
def test_what_may_be_a_secret_is_masked(monkeypatch, capsys, name):
    monkeypatch.setenv(name, "hf_abc")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:mine@hub:8080/x")
    found = environment_report(capsys)["environment"]
    assert (found[name], found["HF_ENDPOINT"]) == ("********", "https://********@hub:8080/x")
    assert main(["env"]) == 0
    assert "hf_abc" not in capsys.readouterr().out


def test_only_variables_that_matter_are_reported():
    known = ["CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "OMP_NUM_THREADS", "RANK"]
    environment = dict.fromkeys([*reversed(known), "EDITOR", "MY_CUDA", "HFX"], "0")
    assert list(variables(environment)) == known


def test_the_configuration_is_reported_with_where_each_setting_comes_from(tmp_path, monkeypatch, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("num_processes: 3\nuse_cpu: true\n")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    found = environment_report(capsys, "--config_file", str(file))["configuration"]
    assert found["file"] == str(file)
    assert found["content"].splitlines()[:2] == ["num_processes: 3", "use_cpu: true"]
    assert found["error"] is None
    assert found["settings"] == {
        "num_processes": {"value": 3, "from": "the configuration file"},
        "cpu": {"value": True, "from": "the configuration file"},
        "mixed_precision": {"value": "bf16", "from": "the variable ACCELERATE_MIXED_PRECISION"},
    }


def test_what_may_be_a_secret_in_the_configuration_is_masked(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("num_processes: 3\nhub_token: hf_abc\nkey_of_mine:  hidden\n")
    assert main(["env", "--config-file", str(file)]) == 0
    text = capsys.readouterr().out
    assert "num_processes: 3" in text
    assert "hub_token: ********" in text
    assert "hf_abc" not in text
    assert "hidden" not in text


def test_the_default_file_is_found(tmp_path, capsys):
    path = tmp_path / "home" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("folder: " + str(tmp_path / "elsewhere"))
    facts = environment_report(capsys)
    assert facts["configuration"]["file"] == str(path)
    assert facts["runs"]["folder"] == str(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"num_processes: [", "line 1"),
        (b"num_processes: many", "num_processes should be"),
        (b"\xff\xfe\x00", "can't be read"),
        (b"distributed_type: MULTI_NPU", "NPUs"),
        (None, "does not exist"),
    ],
)
def test_a_broken_or_missing_configuration_is_reported_in_its_place(tmp_path, capsys, monkeypatch, content, message):
    file = tmp_path / "mine.yaml"
    monkeypatch.setenv("ACCELERATE_NB_FOLDER", str(tmp_path / "elsewhere"))
    if content is not None:
        file.write_bytes(content)
    facts = environment_report(capsys, "--config-file", str(file))
    assert message in facts["configuration"]["error"]
    assert facts["runs"]["folder"] == str(tmp_path / "elsewhere")
    assert facts.keys() == KEYS


def test_the_notebook_service_is_named():
    services = {"COLAB_RELEASE_TAG": "Google Colab", "KAGGLE_KERNEL_RUN_TYPE": "Kaggle"}
    assert {variable: gather({variable: "1"})["machine"]["service"] for variable in services} == services


def test_a_terminal_gets_headings_that_stand_out():
    command = f"{shlex.quote(sys.executable)} -m accelerate_nb.cli.main env"
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    shown, code = pexpect.run(command, withexitstatus=True, env=environment, timeout=60)
    assert code == 0
    assert b"\x1b[1m### torch" in shown
    assert platform.platform().encode() in shown


# ---------------------------------------------------------------------------------------------------------------- TPUs


def test_what_speaks_against_a_tpu_is_reported(monkeypatch):
    monkeypatch.setattr(xla, "installation", lambda: xla.XlaInstallation("2.9.0", "2.13.0", libtpu=True))
    found = gather({"PJRT_DEVICE": "TPU", "CLOUD_TPU_TASK_ID": "0"})
    assert found["devices"]["xla"]["torch_xla"] == "2.9.0"
    assert "torch_xla 2.9.0 loads beside torch 2.9 only" in found["devices"]["xla"]["trouble"]
    assert found["environment"] == {"PJRT_DEVICE": "TPU", "CLOUD_TPU_TASK_ID": "0"}


def test_a_tpus_chips_and_who_holds_them_are_reported(monkeypatch):
    """A stand-in for a TPU: no chip is at hand."""
    monkeypatch.setattr(xla, "installation", lambda: xla.XlaInstallation("2.9.0", "2.9.1", libtpu=True))
    monkeypatch.setattr(xla, "tpu_chips", lambda *_: ["v5e"] * 8)
    monkeypatch.setattr(xla, "holders", lambda *_: [os.getpid(), 1 << 30])
    monkeypatch.setattr(tpu_info, "generation", lambda: "v5e")
    found = gather({})["devices"]
    assert (found["kind"], found["count"]) == ("xla", 8)
    report = found["xla"]
    assert (report["tpu_chips"], report["generation"], report["device"], report["count"]) == (8, "v5e", "TPU", 8)
    assert report["trouble"] is None
    mine, gone = report["held_by"]
    assert mine == {"process": os.getpid(), "name": psutil.Process().name()}
    assert gone == {"process": 1 << 30, "name": None}


def test_a_machine_without_tpus_prints_nothing_of_them(monkeypatch):
    monkeypatch.setattr(xla, "installation", xla.XlaInstallation)
    assert "xla" not in gather({})["devices"]
