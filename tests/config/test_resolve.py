"""What was said in a call, in the environment and in a file becomes one wish."""

import pickle

import numpy as np
import pytest
from accelerate.utils import DynamoBackend

from accelerate_nb.config.magic_args import read_cell_line
from accelerate_nb.config.run_config import RunConfig, all_settings, resolve
from accelerate_nb.config.settings import given_arguments, unset
from accelerate_nb.errors import ConfigurationError, NotYetError, UnknownSettingError

PRECISION = "ACCELERATE_MIXED_PRECISION"


def test_what_nobody_set_has_its_default():
    assert resolve({}, {}) == RunConfig()


def test_an_argument_wins_over_the_environment_and_that_over_the_file():
    file = {"num_processes": 4, "mixed_precision": "fp16", "max_restarts": 3}
    environment = {"ACCELERATE_NB_NUM_PROCESSES": "3", PRECISION: "bf16"}
    config = resolve({"num_processes": 2}, environment, file)
    assert config.launching.num_processes == 2
    assert config.training.mixed_precision == "bf16"
    assert config.launching.max_restarts == 3


@pytest.mark.parametrize(
    ("arguments", "environment", "file", "precision"),
    [
        # a default of a signature leaves the word to the environment, and the same value from a caller wins
        ({"mixed_precision": unset("no")}, {PRECISION: "bf16"}, {}, "bf16"),
        ({"mixed_precision": "no"}, {PRECISION: "bf16"}, {}, "no"),
        # an empty variable sets nothing, and one of this package wins over Accelerate's
        ({}, {PRECISION: ""}, {"mixed_precision": "fp16"}, "fp16"),
        ({}, {"ACCELERATE_NB_MIXED_PRECISION": "fp16", PRECISION: "bf16"}, {}, "fp16"),
        # in any case
        ({"mixed_precision": "BF16"}, {}, {}, "bf16"),
        # fp8 by torchao, also where a file names it
        ({}, {}, {"mixed_precision": "fp8"}, "fp8"),
        ({}, {}, {"mixed_precision": "fp8", "fp8_config": {"backend": "AO", "pad_inner_dim": True}}, "fp8"),
    ],
)
def test_the_first_that_sets_a_value_counts(arguments, environment, file, precision):
    assert resolve(arguments, environment, file).training.mixed_precision == precision


@pytest.mark.parametrize("value", ["no", "", 0, 3, 0.1])
def test_a_marked_default_is_like_its_value_and_was_not_set(value):
    marked = unset(value)
    assert marked == value
    assert repr(marked) == repr(value)
    assert isinstance(marked, type(value))
    assert given_arguments({"name": marked}) == {}
    assert given_arguments({"name": pickle.loads(pickle.dumps(marked))}) == {}
    assert pickle.loads(pickle.dumps(marked)) == value
    assert given_arguments({"name": value}) == {"name": value}


WRONG = {
    "num_processes": [0, -1, True, False, 1.5, "two", "2", [2], float("nan")],
    "timeout": [-1, float("inf"), float("nan"), "ten", True],
    "gpu_ids": ["", ",", "0,", "0,0", "-1", "first", "0,all", True, 1.5, [0]],
    "use_port": ["http", -1, 65536, True],
}


@pytest.mark.parametrize(("setting", "value"), [(setting, value) for setting in WRONG for value in WRONG[setting]])
def test_a_value_that_a_setting_can_not_have_is_named(setting, value):
    wanted = r".* whole number, at least 1.*Pass such" if setting == "num_processes" else ""
    with pytest.raises(ConfigurationError, match=f"{setting} was given as{wanted}"):
        resolve({setting: value}, {})


def test_numpys_whole_numbers_are_numbers():
    config = resolve({"num_processes": np.int64(2), "timeout": np.float32(1.5)}, {})
    assert config.launching.num_processes == 2
    assert type(config.launching.num_processes) is int
    assert config.launching.timeout == 1.5


def test_an_unknown_setting_names_the_nearest_or_the_known_ones():
    with pytest.raises(UnknownSettingError, match=r"'num_proceses'. Did you mean num_processes\?$"):
        resolve({"num_proceses": 2}, {})
    known = r"'zzz'. Leave it out. The settings are address, autolog, cpu, .*timeout"
    with pytest.raises(UnknownSettingError, match=known):
        resolve({"zzz": 2}, {})


@pytest.mark.parametrize(("word", "nearest"), [("NUM_PROCESES", "NUM_PROCESSES"), ("CONFIG_FIL", "CONFIG_FILE")])
def test_a_misspelled_variable_names_the_nearest(word, nearest):
    message = rf"variable ACCELERATE_NB_{word} is set.* Did you mean ACCELERATE_NB_{nearest}\?$"
    with pytest.raises(UnknownSettingError, match=message):
        resolve({}, {f"ACCELERATE_NB_{word}": "2"})


@pytest.mark.parametrize("variable", ["ACCELERATE_NB_CONFIG_FILE", "ACCELERATE_NB_WARM", "ACCELERATE_NB_ZZZ", "OTHER"])
def test_a_variable_that_is_no_setting_s_is_left_alone(variable):
    assert resolve({}, {variable: "0", "ACCELERATE_NB_NUM_PROCESES": ""}) == resolve({}, {})


@pytest.mark.parametrize(
    ("arguments", "environment", "file", "message"),
    [
        ({"mixed_precision": "fp17"}, {}, {}, r"'fp17'.*'no', 'fp16', 'bf16'"),
        ({}, {"ACCELERATE_NB_NUM_PROCESSES": "two"}, {}, "variable ACCELERATE_NB_NUM_PROCESSES is 'two'"),
        ({}, {}, {"num_processes": "many"}, "num_processes in the configuration file is 'many'"),
        ({"node_rank": 1}, {}, {}, "node_rank=1 was given for num_nodes=1"),
        ({"num_nodes": 2, "hosts": "a,b"}, {}, {}, "Leave num_nodes out"),
        ({"num_nodes": 2, "engine": "inline"}, {}, {}, "runs on one machine"),
    ],
)
def test_what_can_not_be_is_named_with_where_it_was_set(arguments, environment, file, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve(arguments, environment, file)


@pytest.mark.parametrize(
    ("arguments", "file", "message"),
    [
        ({"rdzv_backend": "etcd"}, {}, "was given as .* not offered here yet"),
        ({"rdzv_backend": "etcd-v2"}, {}, "was given as .* not offered here yet"),
        # by another package, fp8 is not trained by torchao
        ({}, {"mixed_precision": "fp8", "fp8_config": {"backend": "TE"}}, "fp8 by TE .* not offered here yet"),
        ({}, {"mixed_precision": "fp8", "fp8_config": {"fp8_backend": "TE"}}, "fp8 by TE .* not offered here yet"),
    ],
)
def test_what_comes_later_is_reported_to_come_later(arguments, file, message):
    with pytest.raises(NotYetError, match=message):
        resolve(arguments, {}, file)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_nodes": 1, "node_rank": 0, "rdzv_id": "mine", "rdzv_conf": {"timeout": 3}},
        {"master_addr": "localhost"},
        {"master_addr": "::1"},
        {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:29400"},
        {"rdzv_endpoint": "127.0.0.1:0"},
        {"rdzv_endpoint": "[::1]:29400"},
    ],
)
def test_what_one_machine_can_do_is_accepted(arguments):
    resolve(arguments, {})


@pytest.mark.parametrize(
    ("value", "gpu_ids"),
    [("all", "all"), ("ALL", "all"), ("0", "0"), (1, "1"), (" 0, 2", "0,2"), ("GPU-8f,1", "GPU-8f,1")],
)
def test_accelerators_are_named_by_number_or_all(value, gpu_ids):
    assert resolve({"gpu_ids": value}, {}).launching.gpu_ids == gpu_ids


def test_the_help_of_each_setting_is_a_sentence():
    assert all(setting.help.endswith(".") for setting in all_settings())


def test_compilers_are_accelerates_and_torch_s_for_xla():
    offered = {setting.name: setting for setting in all_settings()}["dynamo_backend"].choices
    assert {word.upper() for word in offered} == {item.value for item in DynamoBackend} | {"OPENXLA"}


@pytest.mark.parametrize(("value", "port"), [(None, 0), (unset("29500"), 0), (0, 0), ("0", 0), ("81", 81), (80, 80)])
def test_a_port_is_any_free_one_unless_it_was_set(value, port):
    assert resolve({"use_port": value}, {}).launching.port == port


def test_workers_receive_only_what_was_set_of_training():
    assert resolve({}, {}).training.environ() == {}
    config = resolve({"mixed_precision": "no", "gradient_accumulation_steps": 4, "debug": True}, {})
    expected = {PRECISION: "no", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_DEBUG_MODE": "true"}
    assert config.training.environ() == expected


def test_workers_receive_whether_to_stay_on_the_cpu_and_resolve_it_to_the_same_again():
    assert resolve({"cpu": True}, {}).environ()["ACCELERATE_USE_CPU"] == "true"
    assert resolve({"cpu": False}, {"ACCELERATE_USE_CPU": "1"}).environ()["ACCELERATE_USE_CPU"] == "false"
    config = resolve({"cpu": True, "mixed_precision": "bf16", "gradient_accumulation_steps": 2, "debug": False}, {})
    assert resolve({}, config.environ()) == config


@pytest.mark.parametrize("text", ["timeout=3, is_host=yes", '{"timeout": "3", "is_host": "yes"}'])
def test_a_mapping_is_written_as_pairs_or_as_json(text):
    assert resolve({}, {"ACCELERATE_NB_RDZV_CONF": text}).launching.rdzv_conf == {"timeout": "3", "is_host": "yes"}


@pytest.mark.parametrize(("former", "name"), [("quiet", "hang_warning_after"), ("grace", "stop_grace_period")])
def test_a_deprecated_name_works_everywhere_and_warns(former, name):
    for spelled in (({former: 7.0}, {}), ({}, {f"ACCELERATE_NB_{former.upper()}": "7"}), ({}, {}, {former: 7})):
        with pytest.warns(FutureWarning, match=f"(?i){name}"):
            assert getattr(resolve(*spelled).launching, name) == 7.0
    with pytest.raises(ConfigurationError, match=f"{former} and {name} were both given"):
        resolve({former: 7.0, name: 7.0}, {})
    with pytest.warns(FutureWarning, match=f"--{former} is now called --{name.replace('_', '-')}"):
        assert read_cell_line(f"--{former} 7")[1] == {name: 7.0}


@pytest.mark.parametrize(("former", "name"), [("also-here", "local"), ("fresh", "restart")])
def test_a_deprecated_flag_of_a_cell_works_and_warns(former, name):
    with pytest.warns(FutureWarning, match=f"--{former} is now called --{name}"):
        assert getattr(read_cell_line(f"--{former}")[0], name)
