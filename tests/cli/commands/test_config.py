"""`accelerate-nb config` asks, shows what it would write, and writes it whole or not at all."""

import io
import os
import re
import sys

import pexpect
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from accelerate_nb.cli.commands.config import prompt
from accelerate_nb.cli.main import main
from accelerate_nb.config import hf_files, hf_keys
from accelerate_nb.config.hf_keys import TpusConfig
from accelerate_nb.config.run_config import all_settings, resolve, values
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.devices.xla import XlaDevices

LAPTOP = AvailableDevices("cpu", "CPU", 0, 2)
SERVER = AvailableDevices("cuda", "GPU", 4, 64, variable="CUDA_VISIBLE_DEVICES")
TPU = AvailableDevices("xla", "TPU chip", 8, 96, xla=XlaDevices("TPU", 8))
DEFAULTS = values(resolve({}, {}))
UP, DOWN, ENTER, SPACE, CLEAR = "\x1b[A", "\x1b[B", "\r", " ", "\x15"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "home" / "accelerate" / "default_config.yaml"


@pytest.fixture
def keyboard(monkeypatch):
    """What is pressed, in a terminal that nobody sees."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys.send_text


def written(path, **settings):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"distributed_type": "NO", **settings}))


# ----------------------------------------------------------------------------------------------------------- questions


@pytest.mark.slow
def test_the_questions_are_answered_in_a_terminal_with_arrow_keys(path):
    words, environment = ["-m", "accelerate_nb", "config"], {**os.environ, "TERM": "xterm"}
    terminal = {"encoding": "utf-8", "timeout": 60, "dimensions": (30, 160)}
    child = pexpect.spawn(sys.executable, words, env=environment, **terminal)
    for shown, keys in (
        ("What does it train on", ENTER),
        (r"\[cpu\]", ""),
        ("no", UP + ENTER),
        (r"\[num_processes\]", CLEAR + "none" + ENTER),
        ("num_processes should be a whole number", CLEAR + "2" + ENTER),
        (r"\[mixed_precision\]", DOWN * 3 + ENTER),
        (r"\[gradient_accumulation_steps\]", "4" + ENTER),
        ("More settings", ENTER),
        (re.escape(str(path)), ""),
        ("mixed_precision: bf16", ""),
        ("Write it", ENTER),
        (f"Written to {path}", ""),
    ):
        child.expect(shown)
        child.send(keys)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert hf_files.read(path) == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_CPU",
        "use_cpu": True,
        "num_processes": 2,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 4,
    }
    assert load_config_from_file(str(path)).num_processes == 2


def test_an_interrupt_writes_nothing_and_reports_it(path, keyboard, capsys):
    written(path, num_processes=3)
    before = path.read_bytes()
    keyboard(ENTER * 2 + "7" + "\x03")
    assert main(["config"]) == 130
    assert "Nothing was written." in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_no_at_the_end_writes_nothing(path, keyboard, capsys):
    keyboard(ENTER * 6 + DOWN + ENTER)
    assert main(["config"]) == 1
    assert not path.exists()
    assert str(path) in capsys.readouterr().out


def test_the_present_file_is_what_one_begins_with_and_its_other_keys_are_kept(path, keyboard, capsys):
    written(path, num_processes=3, use_cpu=True, mixed_precision="bf16", main_training_function="run", timeout=5)
    keyboard(ENTER * 7)
    assert main(["config"]) == 0
    assert "Kept from the existing file: main_training_function." in capsys.readouterr().out
    config = resolve({}, {}, hf_files.read(path))
    assert config == resolve({"num_processes": 3, "cpu": True, "mixed_precision": "bf16", "timeout": 5}, {})
    assert load_config_from_file(str(path)).main_training_function == "run"


def test_another_file_can_be_named(path, tmp_path, keyboard):
    other = tmp_path / "other.yaml"
    keyboard(ENTER * 7)
    assert main(["config", "--config_file", str(other)]) == 0
    assert other.exists()
    assert not path.exists()


def test_this_machine_is_the_suggestion(keyboard):
    keyboard(ENTER * 5)
    settings, outlook = prompt(DEFAULTS, SERVER, can_fork=True)
    assert settings == {"num_processes": 4}
    assert outlook.choice.size == 4


def test_what_cannot_be_on_this_machine_is_an_error_and_a_new_question(keyboard, capsys):
    keyboard(ENTER + CLEAR + "9" + ENTER * 3 + ENTER + CLEAR + "3" + ENTER)
    settings, _ = prompt(DEFAULTS, SERVER, can_fork=True)
    assert settings == {"num_processes": 3}
    assert "num_processes=9 was requested, but this machine has 4 GPUs" in capsys.readouterr().out


def test_advice_is_printed(keyboard, capsys):
    keyboard(ENTER + CLEAR + "8" + ENTER * 4)
    prompt(DEFAULTS, LAPTOP, can_fork=True)
    assert "8 processes would share 2 CPU cores" in capsys.readouterr().out


@pytest.mark.parametrize("stdin", [io.StringIO(), None], ids=["a pipe", "closed"])
def test_without_a_terminal_the_other_ways_are_named(stdin, path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["config"]) == 2
    message = capsys.readouterr().err
    assert "no terminal" in message
    assert "--yes" in message
    assert "config default" in message
    assert not path.exists()


@pytest.mark.parametrize("words", [["config"], ["config", "--yes"]])
def test_a_file_that_requests_what_comes_later_is_not_written_over(path, words, keyboard, capsys):
    written(path, distributed_type="MULTI_NPU")
    before = path.read_bytes()
    assert main(words) == 1
    assert f"{path} requests NPUs" in capsys.readouterr().err
    assert path.read_bytes() == before


# ---------------------------------------------------------------------------------------------------------------- TPUs


def test_a_pods_file_is_written_on_a_laptop_and_accelerate_reads_it(path, keyboard, capsys):
    about_the_pod = DOWN + ENTER + "mine" + ENTER + "us-central2-b" + ENTER + DOWN + ENTER + "A=1,B=2" + ENTER
    bf16 = DOWN * 3 + ENTER
    keyboard(DOWN + ENTER + CLEAR + "train" + ENTER + about_the_pod + bf16 + ENTER * 2 + DOWN + ENTER + ENTER)
    assert main(["config"]) == 0
    content = hf_files.read(path)
    pod = {"is_pod": True, "name": "mine", "zone": "us-central2-b", "sudo": True, "environment": ("A=1", "B=2")}
    assert hf_keys.tpus_of(content) == TpusConfig(function="train", downcasts=True, **pod)
    config = resolve({}, {}, content)
    assert (config.launching.engine, config.launching.num_processes) == ("xla", None)
    assert config.training.mixed_precision == "bf16"
    theirs = load_config_from_file(str(path))
    assert theirs.distributed_type == "XLA"
    assert (theirs.main_training_function, theirs.tpu_name, theirs.tpu_zone) == ("train", "mine", "us-central2-b")
    assert (theirs.tpu_use_cluster, theirs.tpu_use_sudo, theirs.tpu_env) == (True, True, ["A=1", "B=2"])
    assert theirs.downcast_bf16 is True


def test_the_present_answers_on_tpus_are_what_one_begins_with(path, keyboard, capsys):
    config = TpusConfig(function="train", is_pod=True, name="mine", environment=("A=1",))
    written(path, **{"distributed_type": "XLA", "num_processes": 4, **config.keys(), "commands": ["ls"]})
    keyboard(ENTER * 11)
    assert main(["config"]) == 0
    content = hf_files.read(path)
    assert hf_keys.tpus_of(content) == config
    assert content["commands"] == ["ls"]
    assert content["distributed_type"] == "XLA"


def test_all_cores_of_a_tpu_are_the_suggestion(keyboard):
    keyboard(ENTER * 4)
    settings, outlook = prompt({**DEFAULTS, "engine": "xla"}, TPU, can_fork=True, tpus=TpusConfig())
    assert settings == {"engine": "xla"}
    assert outlook.choice.size == 8


def test_some_cores_of_a_tpu_are_refused_with_a_new_question(keyboard, capsys):
    keyboard("3" + ENTER * 4 + CLEAR + "1" + ENTER)
    settings, _ = prompt({**DEFAULTS, "engine": "xla"}, TPU, can_fork=True, tpus=TpusConfig())
    assert settings == {"engine": "xla", "num_processes": 1}
    assert "num_processes=3 was requested" in capsys.readouterr().out


def test_yes_writes_a_pods_file_without_a_question(path, capsys):
    assert main(["config", "--yes", "--tpu", "--tpu-name", "mine", "--tpu_zone", "us-central2-b"]) == 0
    content = hf_files.read(path)
    assert hf_keys.tpus_of(content) == TpusConfig(is_pod=True, name="mine", zone="us-central2-b")
    assert resolve({}, {}, content).launching.engine == "xla"
    assert load_config_from_file(str(path)).tpu_use_cluster is True
    capsys.readouterr()
    assert main(["config", "show"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"tpu_name +mine +the configuration file", output)
    assert re.search(r"engine +xla +the configuration file", output)


# --------------------------------------------------------------------------------------------------- without a question


def test_yes_writes_the_flags_on_top_of_the_file(path, capsys):
    written(path, num_processes=3, mixed_precision="fp16")
    assert main(["config", "--yes", "--cpu", "--mixed-precision", "bf16", "--timeout", "9"]) == 0
    wanted = {"num_processes": 3, "cpu": True, "mixed_precision": "bf16", "timeout": 9}
    assert resolve({}, {}, hf_files.read(path)) == resolve(wanted, {})
    assert load_config_from_file(str(path)).mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "inline", "-n", "2"], "engine='inline' was requested with num_processes=2"),
        (["--tpu", "--cpu"], "together with another device"),
    ],
)
def test_yes_refuses_what_a_launch_would_refuse(path, words, message, capsys):
    assert main(["config", "--yes", *words]) == 2
    assert message in capsys.readouterr().err
    assert not path.exists()


def test_default_writes_a_file_for_this_machine_and_leaves_one_that_is_there(path, capsys):
    assert main(["config", "default", "--mixed_precision", "bf16"]) == 0
    theirs = load_config_from_file(str(path))
    assert (theirs.mixed_precision, theirs.num_processes) == ("bf16", 1)
    assert resolve({}, {}, hf_files.read(path)).training.mixed_precision == "bf16"
    before = path.read_bytes()
    capsys.readouterr()
    assert main(["config", "default"]) == 0
    assert "already and was kept. Pass --force" in capsys.readouterr().out
    assert path.read_bytes() == before
    assert main(["config", "default", "--force"]) == 0
    assert load_config_from_file(str(path)).mixed_precision == "no"
    assert main(["config", "default", "--config_file", str(path.parent)]) == 2
    assert "can't be: Is a directory. Save it to another path." in capsys.readouterr().err


def test_update_writes_an_old_file_as_today_and_shows_what_changed(path, capsys):
    fsdp = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    written(path, **fsdp, fp16=True, dynamo_backend="INDUCTOR", timeout=5)
    content = hf_files.read(path)
    assert main(["config", "update"]) == 0
    output = capsys.readouterr().out
    assert "-fp16: true" in output
    assert "+mixed_precision: fp16" in output
    assert "+#| timeout: 5" in output
    assert hf_files.read(path) == {"compute_environment": "LOCAL_MACHINE", **content}
    theirs = load_config_from_file(str(path))
    assert theirs.dynamo_config == {"dynamo_backend": "INDUCTOR"}
    assert theirs.fsdp_config == {"fsdp_version": 2}
    assert main(["config", "update"]) == 0
    assert "nothing was changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"num_proceses: 2", "did you mean num_processes?"),
        (b"\xff\xfe\x00", "can't be read"),
        (None, "was to be updated, and does not exist"),
    ],
)
def test_update_leaves_a_file_that_nobody_understands_and_needs_one(path, content, message, capsys):
    if content is not None:
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    assert main(["config", "update"]) == 2
    error = capsys.readouterr().err
    assert f"he configuration file {path} " in error
    assert message in error
    assert content is None or path.read_bytes() == content
    assert main(["config", "update", "--config_file", "/"]) == 2
    assert "The configuration file / can't be read: Is a directory" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- showing


def test_show_prints_each_value_and_where_it_was_set(path, capsys, monkeypatch):
    written(path, num_processes=3)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert main(["config", "show"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"Configuration file: {path}\n")
    assert re.search(r"num_processes +3 +the configuration file", output)
    assert re.search(r"mixed_precision +bf16 +the variable ACCELERATE_MIXED_PRECISION", output)
    assert re.search(r"engine +auto +default", output)
    assert all(re.search(rf"^  {setting.name} ", output, re.MULTILINE) for setting in all_settings())


def test_show_prints_what_a_launch_would_refuse_and_all_the_rest(path, capsys):
    written(path, distributed_type="MULTI_NPU", mixed_precision="fp17", num_processes=3)
    assert main(["config", "show"]) == 1
    output = capsys.readouterr()
    assert "requests NPUs" in output.err
    assert "mixed_precision in the configuration file is 'fp17'" in output.err
    assert re.search(r"num_processes +3 +the configuration file", output.out)


def test_the_file_stands_before_or_behind_the_command(tmp_path, capsys):
    other = tmp_path / "other.yaml"
    written(other, num_processes=3)
    for words in (["--config_file", str(other), "show"], ["show", "--config-file", str(other)]):
        assert main(["config", *words]) == 0
        assert str(other) in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--yes"], ["default"], ["update"]])
def test_an_empty_path_is_refused(words, path, capsys):
    assert main(["config", *words, "--config_file", ""]) == 2
    assert "--config_file was given an empty path. Name a file" in capsys.readouterr().err
    assert not path.exists()
