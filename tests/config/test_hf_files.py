"""Accelerate's configuration files are found where its tools put them, and mean here what they mean there."""

import itertools
import json
import os
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from accelerate_nb.config import hf_files
from accelerate_nb.config.environment import runs_folder
from accelerate_nb.config.run_config import RunConfig, resolve
from accelerate_nb.errors import ConfigurationError, NotYetError
from tests.processes import python


def file(folder: Path, text: str | bytes) -> Path:
    """A configuration file with this text."""
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def resolved(path: Path) -> RunConfig:
    """The configuration that a file sets."""
    return resolve({}, {}, hf_files.read(path))


def test_the_default_file_is_found_where_accelerate_has_it(tmp_path):
    places = [("HF_HOME",), ("HF_HOME", "XDG_CACHE_HOME"), ("XDG_CACHE_HOME",), ()]
    environments = [{name: f"{tmp_path}/{i}/{name}" for name in ("HOME", *names)} for i, names in enumerate(places)]
    code = """
import importlib, json, os, sys
from accelerate.commands.config import config_args
for environment in json.loads(sys.argv[1]):
    for name in ("HF_HOME", "XDG_CACHE_HOME"): os.environ.pop(name, None)
    os.environ.update(environment)
    print(importlib.reload(config_args).default_yaml_config_file)
"""
    done = python("-c", code, json.dumps(environments), check=True)
    for environment, theirs in zip(environments, done.stdout.split(), strict=True):
        assert hf_files.find(environment) is None
        os.makedirs(os.path.dirname(theirs))
        early = theirs.removesuffix("yaml") + "json"
        open(early, "w").close()
        assert str(hf_files.find(environment)) == early
        open(theirs, "w").close()
        assert str(hf_files.find(environment)) == theirs


def test_a_folder_that_can_not_be_searched_has_no_files_as_in_accelerate(tmp_path, monkeypatch):
    # for the tests' user, who may be root, a name that is too long; to another's folder the system answers in the same way
    folder = tmp_path / ("x" * 300)
    assert not os.path.isfile(folder / "file")
    with pytest.raises(OSError, match="too long"):
        (folder / "file").is_file()
    assert hf_files.find({"HF_HOME": str(folder)}) is None
    with pytest.raises(ConfigurationError, match="does not exist, or its folder can't be searched"):
        hf_files.find({}, folder / "file.yaml")
    with pytest.raises(ConfigurationError, match="to be written to"):
        saved(folder / "file.yaml", {})
    assert runs_folder({"XDG_CACHE_HOME": str(folder)}) == folder / "accelerate_nb_runs"
    # a user without a home folder
    monkeypatch.setattr(os.path, "expanduser", os.fspath)
    assert hf_files.find({}) is None


def test_a_file_that_was_named_wins(tmp_path):
    default, explicit = tmp_path / "accelerate" / "default_config.yaml", tmp_path / "mine.yaml"
    default.parent.mkdir()
    default.touch()
    explicit.touch()
    environment = {"HF_HOME": str(tmp_path)}
    assert hf_files.find(environment) == default
    assert hf_files.find(environment, explicit) == explicit
    assert hf_files.find({**environment, "ACCELERATE_NB_CONFIG_FILE": str(explicit)}) == explicit
    assert hf_files.find({**environment, "ACCELERATE_NB_CONFIG_FILE": str(explicit)}, default) == default
    # none is read where none is wanted
    assert hf_files.find(environment, "") is None
    assert hf_files.find({**environment, "ACCELERATE_NB_CONFIG_FILE": ""}) is None
    with pytest.raises(ConfigurationError, match=r"gone\.yaml was requested, and does not exist"):
        hf_files.find({}, tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_processes: 2\n  mixed_precision: [no\n", r"config\.yaml, line 2, column 18 can't be read"),
        ('{"a": 1,\n "b" 2}', r"config\.yaml, line 2, column 6 can't be read"),
        (b"\xff\xfe\x00bad", "can't be read"),
        ("- a\n- b\n", "holds list"),
        ("a: 1\n", "the unknown key 'a' in line 1, column 1"),
        ("use_cpu: true\nnum_proceses: 2\n", r"'num_proceses' in line 2, column 1 \(did you mean num_processes\?\)"),
        ("use_cpu: true\n#| timeot: 2\n", r"'timeot' in line 2, column 4 \(did you mean timeout\?\)"),
        ('{"debug": true,\n "moxed_precision": "no"}', r"'moxed_precision' in line 2, column 2"),
        ("a: 1\nb: 2\n", "'a' in line 1, column 1; the unknown key 'b' in line 2.*Correct them"),
    ],
)
def test_what_is_broken_or_unknown_is_named_with_its_place_and_the_nearest(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message):
        hf_files.read(file(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("num_processes: " + "[" * 20_000, "line 1, column 65 can't be read: it has more than 50 levels"),
        ("? " * 20_000, "more than 50 levels"),
        ('{"fsdp_config": ' + '{"a": ' * 5000 + "}" * 5001, "more than 50 levels"),
        ("num_processes: " + "9" * 5000, "it has a number that is too large"),
        ("num_processes: 0x" + "f" * 5000, "it has a number that is too large"),
        ('{"num_processes": ' + "9" * 5000 + "}", "it has a number that is too large"),
        ("x" * 3_000_000, "it has more than 50,000 bytes"),
        (
            "num_processes: " + "x" * 40_000,
            r"is 'x{299}\.\.\. \(40,002 characters\), but num_processes should be a whole",
        ),
        ("? " + "x" * 40_000 + "\n: 2", r"the unknown key 'x{299}\.\.\. \(40,002 characters\) in line 1"),
        ("".join(f"k{number}: 1\n" for number in range(4000)), "; and 3980 more. Correct them"),
        ("a: &a [x, x]\n" + "b: [*a, *a]\n" * 6, "it has more than 10 aliases"),
        ("fsdp_config: &a {x: *a}", "can't be read"),
        ('num_processes: !!int ""', "can't be read"),
        ("num_processes: 2001-99-99", "can't be read"),
    ],
    ids=itertools.count(),
)
def test_a_file_that_no_person_writes_is_refused_in_a_sentence(tmp_path, text, why):
    path = file(tmp_path, text)
    with pytest.raises(ConfigurationError, match=why) as caught:
        resolved(path)
    assert len(str(caught.value)) < 3000


CP_SIZE = "parallelism_config_cp_size"
OF_TYPES = ["distributed_type: no\n", "distributed_type: MULTI_GPU\n"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "num_processes: -1\nmain_process_port: null\n", *OF_TYPES])
def test_what_sets_nothing_leaves_the_defaults(tmp_path, text):
    assert resolved(file(tmp_path, text)) == resolve({}, {})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("distributed_type: MULTI_NPU\n", "NPUs"),
        ("compute_environment: AMAZON_SAGEMAKER\n", "AMAZON_SAGEMAKER"),
        ("parallelism_config: {parallelism_config_sp_size: 2}\n", "parallelism_config_sp_size: 2"),
    ],
)
def test_what_a_file_requests_and_comes_later_is_read_and_refused_by_a_launch(tmp_path, text, what):
    path = file(tmp_path, text + "num_processes: 2\n")
    content = hf_files.read(path)
    assert content["num_processes"] == 2
    with pytest.raises(NotYetError, match=rf"requests .*{what}.*config_file=''"):
        resolve({}, {}, content)


def test_what_a_file_sets_of_training_is_resolved(tmp_path):
    assert resolved(file(tmp_path, "mixed_precision: no\n")).training.mixed_precision == "no"
    text = f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2}}\nparallelism_config: {{{CP_SIZE}: 2}}\n"
    # sequences are split among ranks
    assert resolved(file(tmp_path, text)).training.parallelism_config == {CP_SIZE: 2}


def test_a_way_to_train_that_nobody_knows_names_the_nearest(tmp_path):
    path = file(tmp_path, "distributed_type: MULTI_GPUS\n")
    with pytest.raises(ConfigurationError, match=r"MULTI_GPUS, which is unknown\. Did you mean MULTI_GPU\?"):
        resolved(path)


RELEASED = sorted((Path(__file__).parent / "released").glob("*/*.yaml"))
_SUPPORTED = {"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MPS", "use_mps_device", "basic"}
_SUPPORTED |= {"TPU", "XLA", "FSDP", "DEEPSPEED", "MEGATRON_LM"}


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_files_of_every_release_of_accelerate_are_read(path):
    content = hf_files.read(path)
    entries = yaml.safe_load(path.read_text())
    is_for_tpus = path.stem in {"TPU", "XLA"}
    assert content["distributed_type"] == ("XLA" if is_for_tpus else entries["distributed_type"])
    if path.stem not in _SUPPORTED:
        with pytest.raises(NotYetError, match="requests"):
            resolve({}, {}, content)
        return
    config = resolve({}, {}, content)
    assert config.training.mixed_precision == entries["mixed_precision"] == "bf16"
    # their launcher starts one for each core of a TPU, whatever the file says
    assert (config.launching.num_processes or -1) == (-1 if is_for_tpus else entries["num_processes"])
    assert config.launching.engine == ("xla" if is_for_tpus else "auto")
    assert config.launching.cpu is bool(entries.get("use_cpu"))
    assert config.training.debug is entries.get("debug")
    assert config.launching.port == (entries.get("main_process_port") or 0)
    compiler = {**entries, **(entries.get("dynamo_config") or {})}.get("dynamo_backend")
    strategies = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}
    assert config.training.strategy == strategies.get(path.stem)
    assert (config.training.dynamo_backend or "no").upper() == (compiler or "NO")
    assert config.launching.gpu_ids == (entries.get("gpu_ids") or "all")


@pytest.mark.slow
@pytest.mark.parametrize("path", RELEASED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_files_of_every_release_are_renewed_to_what_todays_accelerate_loads(path, tmp_path):
    copy = tmp_path / "config.yaml"
    copy.write_bytes(path.read_bytes())
    before = hf_files.read(copy)
    hf_files.renewed(copy, "NO").write()
    assert hf_files.read(copy) == before
    assert hf_files.renewed(copy, "NO").text == copy.read_text()
    # words that today's release does not know, and a file of its own that it refuses (of SageMaker, for one process)
    gone = {"TP", "MPS"}
    if before["distributed_type"] not in gone and path.stem != "sagemaker":
        theirs = load_config_from_file(str(copy))
        assert theirs.mixed_precision == before["mixed_precision"]


def test_a_file_from_before_mixed_precision_had_its_name_is_read(tmp_path):
    path = file(tmp_path, "distributed_type: NO\nfp16: true\n")
    assert resolved(path).training.mixed_precision == "fp16"
    draft = hf_files.renewed(path, "NO")
    common = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"}
    assert draft.content == {**common, "mixed_precision": "fp16"}
    assert draft.changed == ("fp16",)


def test_settings_of_this_package_beside_accelerates_are_read_and_renewed_into_comments(tmp_path):
    path = file(tmp_path, "cpu: true\ntimeout: 5\nmixed_precision: fp16\n#| mixed_precision: bf16\n")
    before = hf_files.read(path)
    assert before == {"cpu": True, "timeout": 5, "mixed_precision": "bf16"}
    hf_files.renewed(path, "MULTI_CPU").write()
    assert path.read_text().splitlines()[1:] == [
        "distributed_type: MULTI_CPU",
        "use_cpu: true",
        "mixed_precision: bf16",
        "# What follows is read by accelerate_nb alone.",
        "#| timeout: 5",
    ]
    assert resolved(path) == resolve({}, {}, before)


def saved(path, content):
    draft = hf_files.draft(path, content)
    draft.write()
    return draft


def test_a_file_is_written_with_its_folders(tmp_path):
    path = tmp_path / "new" / "config.yaml"
    assert not saved(path, {"num_processes": 2, "mixed_precision": "no"}).replaces
    assert hf_files.read(path) == {"num_processes": 2, "mixed_precision": "no"}
    assert [item.name for item in path.parent.iterdir()] == ["config.yaml"]


def test_keys_of_others_are_kept_and_named(tmp_path):
    others = "main_training_function: run\nmpirun_config: {a: 1}\n"
    path = file(tmp_path, f"# mine\nuse_cpu: true\nnum_processes: 4\n{others}")
    draft = saved(path, {"num_processes": 2})
    assert draft.replaces
    assert draft.comments
    assert draft.kept == ("main_training_function", "mpirun_config")
    assert draft.changed == ("use_cpu", "num_processes")
    assert hf_files.read(path) == {"num_processes": 2, "main_training_function": "run", "mpirun_config": {"a": 1}}


@pytest.mark.parametrize(
    ("text", "error"),
    [("a: [1\nb: 2\n", "line 2"), ("- a\n", "holds list"), ("distributed_type: MULTI_NPU\n", "requests NPUs")],
)
def test_a_file_that_is_not_understood_is_not_written_over(tmp_path, text, error):
    path = file(tmp_path, text)
    with pytest.raises((ConfigurationError, NotYetError), match=error):
        saved(path, {"num_processes": 2})
    assert path.read_text() == text


@pytest.mark.parametrize("path", ["", "file.yaml/config.yaml"])
def test_a_place_that_cannot_be_written_is_reported(tmp_path, path):
    (tmp_path / "file.yaml").write_text("")
    with pytest.raises(ConfigurationError, match="to be written to"):
        saved(tmp_path / path, {})
