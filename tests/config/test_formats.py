"""Every spelling of a configuration means the same configuration."""

import json
import shlex

import pytest
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from accelerate_nb.config import formats, hf_files, hf_keys, value_types
from accelerate_nb.config.run_config import all_settings, differing, origins, resolve, values
from accelerate_nb.errors import ConfigurationError

# What asks for several machines is no configuration yet; these are values of theirs that are one.
HARMLESS = {
    "num_nodes": 1,
    "node_rank": 0,
    "master_addr": "localhost",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "[::1]:9",
    "fsdp_config": {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "A,B"},
    "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"},
    "megatron_lm_config": {"megatron_lm_tp_degree": 2},
    "parallelism_config": {"parallelism_config_dp_replicate_size": 1},
}
OF_A_TYPE = {
    value_types.Number: 7.5,
    value_types.NamedValues: {"timeout": 30, "name": "a b"},
    value_types.DeviceIds: "0,2",
    value_types.NodeCount: 3,
    value_types.HostList: "a,b:4",
    value_types.Label: '-“it\'s”, "a\\b": # é',
    value_types.LabelList: "-a b,it's",
    value_types.Text: '-${rank} “it\'s”, "a\\b": ',
}


def other_than_default(setting):
    """A value of a setting that is not its default."""
    if setting.name in HARMLESS:
        return HARMLESS[setting.name]
    if setting.choices:
        return next(word for word in setting.choices if word != setting.default)
    if isinstance(setting.value_type, value_types.Boolean):
        return not setting.default
    if isinstance(setting.value_type, value_types.Integer):
        return int(setting.value_type.minimum or 0) + 3
    return OF_A_TYPE[type(setting.value_type)]


SINGLE_SETTINGS = [{setting.name: other_than_default(setting)} for setting in all_settings()]
ALL = {name: value for item in SINGLE_SETTINGS for name, value in item.items()}
SEVERAL = [{}, *SINGLE_SETTINGS, ALL, {"debug": False}, {"mixed_precision": "no", "num_processes": 2}]


def notebook_launcher(function, **settings):
    return settings


@pytest.mark.parametrize("settings", SEVERAL, ids=lambda settings: ",".join(settings)[:40] or "nothing")
class TestEverySetting:
    def test_what_differs_makes_the_same_configuration_again(self, settings):
        config = resolve(settings, {})
        assert resolve(differing(config), {}) == config
        defaults = values(resolve({}, {}))
        assert differing(config) == {name: value for name, value in settings.items() if defaults[name] != value}

    def test_the_cell_sets_it(self, settings):
        config = resolve(settings, {})
        cell = formats.call(formats.explicit_settings(config))
        evaluated = eval(cell, {"notebook_launcher": notebook_launcher, "train": None})
        assert resolve(evaluated, {}) == config

    def test_the_command_line_and_the_magic_set_it(self, settings):
        config = resolve(settings, {})
        explicit = formats.explicit_settings(config)
        command, magic = formats.command(explicit, "my script.py"), formats.magic(explicit)
        assert command.startswith("accelerate-nb launch ")
        assert shlex.split(magic)[0] == "%%accelerate"
        assert "\n" not in magic
        for words, others in ((shlex.split(command)[2:], ["my script.py"]), (shlex.split(magic)[1:], [])):
            found, rest = formats.read_words(words, all_settings(), "a line")
            assert (resolve(found, {}), rest) == (config, others)

    def test_the_file_sets_it_and_accelerate_loads_it(self, settings, tmp_path):
        config = resolve(settings, {})
        path = tmp_path / "config.yaml"
        content = formats.keys(config, "NO")
        hf_files.draft(path, content).write()
        assert path.read_text() == formats.text(content)
        assert resolve({}, {}, hf_files.read(path)) == config
        assert load_config_from_file(str(path)).distributed_type.value == "NO"

    def test_a_json_file_sets_it_or_is_refused_as_accelerate_would_refuse_it(self, settings, tmp_path):
        config = resolve(settings, {})
        path = tmp_path / "config.json"
        content = formats.keys(config, "NO")
        if extension_keys := formats.extension_keys(content):
            message = rf"can't hold {', '.join(extension_keys)}.*Name a \.yaml file"
            with pytest.raises(ConfigurationError, match=message):
                hf_files.draft(path, content)
            path.write_text(json.dumps(content))
            with pytest.raises(ValueError, match="unknown keys"):
                load_config_from_file(str(path))
        else:
            hf_files.draft(path, content).write()
            load_config_from_file(str(path))
        assert resolve({}, {}, hf_files.read(path)) == config


@pytest.mark.parametrize("distributed_type", ["NO", "MULTI_CPU", "MULTI_GPU"])
def test_accelerate_understands_the_file_for_its_launch(tmp_path, distributed_type):
    settings = {
        "num_processes": 3,
        "mixed_precision": "bf16",
        "cpu": distributed_type == "MULTI_CPU",
        "debug": True,
        "use_port": 29511,
        "gpu_ids": "0,2,3",
        "enable_cpu_affinity": True,
        "dynamo_backend": "inductor",
        "dynamo_mode": "reduce-overhead",
        "dynamo_use_dynamic": True,
        "timeout": 60,
    }
    path = tmp_path / "config.yaml"
    hf_files.draft(path, formats.keys(resolve(settings, {}), distributed_type)).write()
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments.nondefault = set()
    theirs, _, _ = _validate_launch_command(arguments)
    assert (theirs.num_processes, theirs.mixed_precision, theirs.use_cpu) == (3, "bf16", settings["cpu"])
    assert (theirs.debug, theirs.main_process_port, theirs.gpu_ids) == (True, 29511, "0,2,3")
    assert theirs.multi_gpu is (distributed_type == "MULTI_GPU")
    assert (theirs.dynamo_backend, theirs.dynamo_mode) == ("inductor", "reduce-overhead")
    assert (theirs.dynamo_use_dynamic, theirs.dynamo_use_fullgraph) == (True, False)


def test_the_keys_that_accelerate_knows_are_those_of_accelerate():
    assert set(ClusterConfig.__dataclass_fields__) == hf_keys.OF_ACCELERATE
    assert set(SageMakerConfig.__dataclass_fields__) - hf_keys.OF_ACCELERATE == hf_keys.OF_SAGEMAKER


@pytest.mark.parametrize("value", ["two\n\nlines ", "# no comment", "#| mine", " x: [", "ü" * 200, "\t'\"\\"])
def test_a_text_of_any_kind_goes_through_a_comment(tmp_path, value):
    path = tmp_path / "config.yaml"
    path.write_text(formats.text({"distributed_type": "NO", "folder": value, "rdzv_conf": {"a": value, "b": [1]}}))
    assert hf_files.read(path)["folder"] == value
    assert hf_files.read(path)["rdzv_conf"] == {"a": value, "b": [1]}
    assert "folder" not in load_config_from_file(str(path)).to_dict()


def test_a_call_spells_out_what_would_else_be_overruled_from_elsewhere():
    elsewhere = {"mixed_precision": "bf16", "cpu": True, "num_processes": 4}
    config = resolve({"mixed_precision": "no", "num_processes": 4}, {})
    assert formats.explicit_settings(config) == {"num_processes": 4, "mixed_precision": "no"}
    assert formats.explicit_settings(config, elsewhere) == {"num_processes": 4, "cpu": False, "mixed_precision": "no"}
    assert formats.inexpressible(config, elsewhere) == ()
    assert formats.inexpressible(resolve({}, {}), elsewhere) == ("mixed_precision", "num_processes")


def test_a_long_call_stands_on_several_lines():
    cell = formats.call({"num_processes": 2, "folder": "x" * 80})
    assert cell.splitlines()[1:3] == ["    train,", "    num_processes=2,"]


def test_where_each_value_was_set_is_known():
    environment = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "1"}
    sources = ({"cpu": False}, environment, {"num_processes": 2, "mixed_precision": "fp16"})
    found = origins(*sources)
    assert {name: (origin.value, origin.source) for name, origin in found.items() if origin.source} == {
        "cpu": (False, "the call"),
        "mixed_precision": ("bf16", "the variable ACCELERATE_MIXED_PRECISION"),
        "num_processes": (2, "the configuration file"),
    }
    assert {name: origin.value for name, origin in found.items()} == values(resolve(*sources))
