"""Every spelling of a configuration means the same configuration."""

from __future__ import annotations

import contextlib
import shlex

import pytest
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

from accelerate_nb.config import files, spelling
from accelerate_nb.config.kinds import Ids, Number, OneOf, Table, Text, Whole, YesNo
from accelerate_nb.config.run import all_settings, differing, origins, resolve, values
from accelerate_nb.errors import ConfigurationError

# What asks for several machines is no configuration yet; these are values of theirs that are one.
HARMLESS = {
    "num_nodes": 1,
    "node_rank": 0,
    "master_addr": "localhost",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "[::1]:9",
}


def other_than_default(one):
    """A value of a setting that is not its default."""
    if one.name in HARMLESS:
        return HARMLESS[one.name]
    match one.kind:
        case OneOf():
            return next(word for word in one.choices if word != one.default)
        case YesNo():
            return not one.default
        case Whole():
            return int(one.kind.minimum or 0) + 3
        case Number():
            return 7.5
        case Table():
            return {"timeout": 30, "name": "a b"}
        case Ids():
            return "0,2"
        case Text():
            return '-${rank} “it\'s”, "a\\b": '
    raise AssertionError(f"{one.name} is of a kind that this test does not know")


EACH = [{one.name: other_than_default(one)} for one in all_settings()]
ALL = {name: value for one in EACH for name, value in one.items()}
SEVERAL = [{}, *EACH, ALL, {"debug": False}, {"mixed_precision": "no", "num_processes": 2}]


def notebook_launcher(function, **settings):
    return settings


@pytest.mark.parametrize("said", SEVERAL, ids=lambda said: ",".join(said)[:40] or "nothing")
class TestEverySetting:
    def test_what_differs_makes_the_same_configuration_again(self, said):
        config = resolve(said, {})
        assert resolve(differing(config), {}) == config
        assert differing(config) == {
            name: value for name, value in said.items() if values(resolve({}, {}))[name] != value
        }

    def test_the_cell_says_it(self, said):
        config = resolve(said, {})
        cell = spelling.call(spelling.to_say(config))
        evaluated = eval(cell, {"notebook_launcher": notebook_launcher, "train": None})
        assert resolve(evaluated, {}) == config

    def test_the_command_line_says_it(self, said):
        config = resolve(said, {})
        words = shlex.split(spelling.command(spelling.to_say(config), "my script.py"))
        assert words[:2] == ["accelerate-nb", "launch"]
        found, rest = spelling.read_flags(words[2:])
        assert resolve(found, {}) == config
        assert rest == ["my script.py"]

    def test_the_magic_says_it(self, said):
        config = resolve(said, {})
        line = spelling.magic(spelling.to_say(config))
        name, *words = shlex.split(line)
        assert name == "%%accelerate"
        assert "\n" not in line
        assert resolve(spelling.read_flags(words)[0], {}) == config

    @pytest.mark.parametrize("suffix", ["yaml", "json"])
    def test_the_file_says_it(self, said, suffix, tmp_path):
        config = resolve(said, {})
        path = tmp_path / f"config.{suffix}"
        files.draft(path, spelling.keys(config, "NO")).write()
        assert resolve({}, {}, files.read(path)) == config


@pytest.mark.parametrize("distributed_type", ["NO", "MULTI_CPU", "MULTI_GPU"])
def test_accelerate_loads_the_file(tmp_path, distributed_type):
    said = {"num_processes": 3, "mixed_precision": "bf16", "cpu": True, "debug": True, "use_port": 29511}
    path = tmp_path / "config.yaml"
    content = spelling.keys(resolve(said, {}), distributed_type)
    assert spelling.strange_to_accelerate(content) == ()
    files.draft(path, content).write()
    theirs = load_config_from_file(str(path))
    assert theirs.distributed_type.value == distributed_type
    assert (theirs.num_processes, theirs.mixed_precision, theirs.use_cpu) == (3, "bf16", True)
    assert (theirs.debug, theirs.main_process_port) == (True, 29511)


@pytest.mark.parametrize("one", all_settings(), ids=lambda one: one.name)
def test_what_accelerate_would_refuse_is_known_before(one, tmp_path):
    config = resolve({one.name: other_than_default(one)}, {})
    content = spelling.keys(config, "NO")
    path = tmp_path / "config.yaml"
    files.draft(path, content).write()
    refused = spelling.strange_to_accelerate(content)
    assert refused in {(), (one.name,)}
    with pytest.raises(ValueError, match="unknown keys") if refused else contextlib.nullcontext():
        load_config_from_file(str(path))


def test_the_keys_that_accelerate_knows_are_those_of_accelerate():
    theirs = set(ClusterConfig.__dataclass_fields__)
    of_settings = {key for one in all_settings() for key in one.keys} | {"compute_environment", "distributed_type"}
    assert (of_settings | set(spelling.TOGETHER)) & theirs == spelling.KNOWN_TO_ACCELERATE


def test_a_call_says_what_would_else_be_overruled_from_elsewhere():
    elsewhere = {"mixed_precision": "bf16", "cpu": True, "num_processes": 4}
    config = resolve({"mixed_precision": "no", "num_processes": 4}, {})
    assert spelling.to_say(config) == {"num_processes": 4, "mixed_precision": "no"}
    assert spelling.to_say(config, elsewhere) == {"num_processes": 4, "cpu": False, "mixed_precision": "no"}
    assert spelling.unsayable(config, elsewhere) == ()
    assert spelling.unsayable(resolve({}, {}), elsewhere) == ("mixed_precision", "num_processes")


def test_a_long_call_stands_on_several_lines():
    cell = spelling.call({"num_processes": 2, "folder": "x" * 80})
    assert cell.splitlines()[1:3] == ["    train,", "    num_processes=2,"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num-proceses", "2"], "Did you mean --num-processes?"),
        (["--num-processes"], "without a value"),
        (["--num-processes", "two"], "'two', but num_processes should be"),
        (["--no-num-processes"], "Did you mean --num-processes?"),
    ],
)
def test_a_command_line_that_means_nothing_is_told(words, says):
    with pytest.raises(ConfigurationError, match=says.replace("?", r"\?")):
        spelling.read_flags(words)


def test_words_after_the_settings_are_the_scripts():
    assert spelling.read_flags(["--cpu", "--", "--cpu", "x"]) == ({"cpu": True}, ["--cpu", "x"])
    assert spelling.read_flags(["--num-processes=2", "a.py", "--lr", "1"]) == (
        {"num_processes": 2},
        ["a.py", "--lr", "1"],
    )


def test_where_each_value_was_said_is_known():
    environment = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "1"}
    found = origins({"cpu": False}, environment, {"num_processes": 2, "mixed_precision": "fp16"})
    assert {name: (one.value, one.place) for name, one in found.items() if one.place} == {
        "cpu": (False, "the call"),
        "mixed_precision": ("bf16", "the variable ACCELERATE_MIXED_PRECISION"),
        "num_processes": (2, "the configuration file"),
    }
    assert {name: one.value for name, one in found.items()} == values(
        resolve({"cpu": False}, environment, {"num_processes": 2, "mixed_precision": "fp16"})
    )
