"""Files, flags and settings for sharded weights become the variables that Accelerate's launcher sets."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from accelerate_nb.config import formats, hf_files
from accelerate_nb.config.options import deepspeed, fsdp, megatron, parallelism
from accelerate_nb.config.options.entries import Entries
from accelerate_nb.config.run_config import RunConfig, differing, resolve
from accelerate_nb.errors import ConfigurationError, NotYetError
from tests.cli.launch_requests import request_of


@pytest.fixture(autouse=True)
def _no_other_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in sharding(os.environ):
        monkeypatch.delenv(name)


def sharding(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of strategies among these."""
    prefixes = ("FSDP_", "ACCELERATE_USE_FSDP", "PARALLELISM_CONFIG_", "ACCELERATE_USE_PARALLELISM_CONFIG")
    return {name: value for name, value in variables.items() if name.startswith(prefixes)}


def theirs(*words: str) -> dict[str, str]:
    """What Accelerate's launcher sets for a command line."""
    arguments = launch_command_parser().parse_args([*words, "--main_process_port", "0", "script.py"])
    arguments, *_ = _validate_launch_command(arguments)
    return sharding(prepare_multi_gpu_env(arguments))


def written(path: Path, content: Mapping[str, Any]) -> Path:
    common = {"compute_environment": "LOCAL_MACHINE", "num_processes": 4, "mixed_precision": "no"}
    path.write_text(yaml.safe_dump({**common, **content}))
    return path


VERSION_2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "BertLayer,BertEmbeddings",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_activation_checkpointing": False,
}
VERSION_1 = {
    "fsdp_version": 1,
    "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
    "fsdp_offload_params": True,
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 2000,
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_forward_prefetch": False,
    "fsdp_use_orig_params": True,
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_sync_module_states": True,
    "fsdp_activation_checkpointing": True,
}
SIZES = {"dp_replicate": 2, "dp_shard": 2, "tp": 1, "cp": 1}
DEGREES = {f"parallelism_config_{name}_size": size for name, size in SIZES.items()}
RECOMPUTES = dict.fromkeys(("fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload"), True)
FILES: list[dict[str, Any]] = [
    {"distributed_type": "FSDP", "fsdp_config": VERSION_2},
    {"distributed_type": "FSDP", "fsdp_config": VERSION_1},
    {"distributed_type": "FSDP"},
    {"distributed_type": "FSDP", "fsdp_config": {}},
    {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": "HYBRID_SHARD"}},
    {"distributed_type": "FSDP", "fsdp_config": {"version": 2, "offload_params": True, "min_num_params": 5}},
    {"distributed_type": "FSDP", "fsdp_config": {"fsdp_ignored_modules": "head.*"}},
    {"distributed_type": "FSDP", "fsdp_config": {"fsdp_backward_prefetch_policy": "BACKWARD_PRE"}},
    {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, **RECOMPUTES}},
    {"distributed_type": "FSDP", "fsdp_config": VERSION_2, "parallelism_config": DEGREES},
    {"distributed_type": "MULTI_GPU", "parallelism_config": {"parallelism_config_dp_replicate_size": 4}},
    {"distributed_type": "MULTI_GPU", "fsdp_config": VERSION_2},
    {"distributed_type": "MULTI_GPU"},
]
# the file's entries for DeepSpeed itself have tests of their own
SEQUENCES = {
    "parallelism_config_sp_size": 2,
    "parallelism_config_sp_backend": "deepspeed",
    "parallelism_config_sp_seq_length": 8,
    "parallelism_config_sp_seq_length_is_variable": False,
    "parallelism_config_sp_attn_implementation": "sdpa",
}


def test_sequences_of_deepspeed_become_the_variables_that_accelerate_sets(tmp_path: Path) -> None:
    # both ways to train set these variables alike there
    path = written(tmp_path / "gpus.yaml", {"distributed_type": "MULTI_GPU", "parallelism_config": SEQUENCES})
    expected = {key: text.lower() for key, text in theirs("--config_file", str(path)).items() if "_SP_" in key}
    content = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}, "parallelism_config": SEQUENCES}
    path = written(tmp_path / "config.yaml", content)
    ours = resolve({}, {}, hf_files.read(path)).environ()
    found = {key: text.lower() for key, text in ours.items() if "_SP_" in key}
    assert found == expected
    assert found["PARALLELISM_CONFIG_SP_SEQ_LENGTH"] == "8"


@pytest.mark.parametrize("content", FILES)
def test_a_file_becomes_the_variables_that_accelerate_sets(content: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path / "config.yaml", content)
    config = resolve({}, {}, hf_files.read(path))
    assert sharding(config.environ()) == theirs("--config_file", str(path))


FLAGS: list[list[str]] = [
    ["--use_fsdp"],
    ["--use_fsdp", "--fsdp_version", "2"],
    ["--use_fsdp", "--fsdp_version", "2", "--fsdp_offload_params", "true", "--fsdp_min_num_params", "7"],
    ["--use_fsdp", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "A,B"],
    ["--use_fsdp", "--fsdp_sharding_strategy", "SHARD_GRAD_OP", "--fsdp_backward_prefetch", "BACKWARD_POST"],
    ["--use_fsdp", "--fsdp_reshard_after_forward", "false", "--fsdp_state_dict_type", "FULL_STATE_DICT"],
    ["--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config", "--parallelism_config_dp_shard_size", "2"],
    ["--fsdp_offload_params", "true"],
]


@pytest.mark.parametrize("words", FLAGS)
def test_flags_become_the_variables_that_accelerate_sets(words: list[str]) -> None:
    processes = ("--num_processes", "2")
    expected = theirs(*words, *processes, "--mixed_precision", "no", "--num_machines", "1")
    assert sharding(request_of(*words, *processes).config.environ()) == expected


@pytest.mark.parametrize("words", [[], *FLAGS[1:3], FLAGS[-1], ["--use_fsdp"]])
@pytest.mark.parametrize("content", [*FILES[:2], FILES[2], FILES[9], FILES[-2]])
def test_a_flag_wins_over_the_file_as_it_does_there(words: list[str], content: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path / "config.yaml", content)
    expected = theirs(*words, "--config_file", str(path))
    if words and words[0] == "--use_fsdp" and "parallelism_config" in content:
        # there a flag of a way to train leaves the degrees of the file out
        expected = {**theirs("--config_file", str(path)), **expected}
    assert sharding(request_of(*words, "--config_file", str(path)).config.environ()) == expected


def test_the_short_spelling_needs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert sharding(resolve({"strategy": "fsdp"}, {}).environ()) == expected
    assert sharding(resolve({}, {"ACCELERATE_NB_STRATEGY": "fsdp"}).environ()) == expected
    assert sharding(request_of("--strategy", "fsdp").config.environ()) == expected
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert sharding(resolve({"strategy": "ddp"}, os.environ).environ()) == {"ACCELERATE_USE_FSDP": "false"}
    assert sharding(resolve({}, {}).environ()) == {}


def test_options_of_the_short_spelling_are_of_version_2() -> None:
    by_call = resolve({"strategy": "fsdp", "fsdp_config": {"offload_params": True}}, {})
    assert by_call == request_of("--strategy", "fsdp", "--fsdp_offload_params", "yes").config
    variables = by_call.environ()
    assert (variables["FSDP_VERSION"], variables["FSDP_OFFLOAD_PARAMS"]) == ("2", "true")


def test_a_strategy_wins_over_the_file() -> None:
    config = resolve({"strategy": "ddp"}, {}, {"distributed_type": "FSDP", "fsdp_config": VERSION_2})
    assert sharding(config.environ()) == {"ACCELERATE_USE_FSDP": "false"}


def test_names_of_classes_can_be_a_list() -> None:
    options = {"fsdp_transformer_layer_cls_to_wrap": ["A", "B"], "fsdp_auto_wrap_policy": "transformer_based_wrap"}
    variables = resolve({"strategy": "fsdp", "fsdp_config": options}, {}).environ()
    assert variables["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "A,B"
    assert variables["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "fsdp"},
        {"strategy": "fsdp", "fsdp_config": {"fsdp_version": 1, "fsdp_offload_params": True}},
        {"strategy": "fsdp", "fsdp_config": {"fsdp_min_num_params": 5}},
        {"strategy": "fsdp", "parallelism_config": DEGREES},
    ],
)
def test_a_file_that_is_written_means_the_same_to_both(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    config = resolve(settings, {})
    content = {"num_processes": 4, "mixed_precision": "no", **formats.keys(config, "MULTI_GPU")}
    hf_files.draft(path, content).write()
    again = resolve({}, {}, hf_files.read(path))
    assert sharding(again.environ()) == sharding(config.environ())
    assert resolve(differing(config), {}) == config
    their_variables = theirs("--config_file", str(path))
    assert sharding(config.environ()).items() <= their_variables.items()


OF_FSDP: list[tuple[dict[str, Any], str]] = [
    ({"auto_wrap_polcy": "NO_WRAP"}, r"no key 'fsdp_auto_wrap_polcy'. Did you mean fsdp_auto_wrap_policy\?"),
    ({"auto_wrap_policy": "TRANSFORMER_WRAP"}, r"'TRANSFORMER_WRAP', but should be one of 'TRANSFORMER_"),
    ({"auto_wrap_policy": "TRANSFORMER_BASE_WRAP"}, r"Did you mean TRANSFORMER_BASED_WRAP\?"),
    ({"state_dict_type": "FULL"}, "but should be one of 'SHARDED_STATE_DICT', 'FULL_STATE_DICT'"),
    ({"version": 3}, "fsdp_version is 3, but should be a whole number from 1 to 2"),
    ({"offload_params": "cpu"}, "fsdp_offload_params is 'cpu', but should be True or False"),
    ({"sharding_strategy": "NO_SHARD"}, "NO_SHARD shards nothing: train with DDP"),
    ({"sharding_strategy": 3}, "NO_SHARD shards nothing: train with DDP"),
]
MISTAKES: list[tuple[dict[str, Any], str]] = [
    *(({"fsdp_config": {f"fsdp_{key}": value for key, value in found.items()}}, message) for found, message in OF_FSDP),
    ({"fsdp_config": {"sharding": 1}}, r"no key 'sharding'"),
    ({"fsdp_config": "all"}, "should be a mapping"),
    ({"parallelism_config": {"dp_shards_size": 2}}, r"Did you mean parallelism_config_dp_shard_size\?"),
    ({"parallelism_config": {"dp_shard_size": 0}}, "dp_shard_size is 0, but should be a whole number, at least 1"),
    ({"strategy": "fspd"}, "strategy should be one of 'ddp', 'fsdp'"),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES)
@pytest.mark.parametrize(
    "read",
    [
        lambda settings: resolve(settings, {}),
        lambda settings: resolve({}, {}, {"distributed_type": "FSDP", **settings}),
    ],
    ids=["call", "file"],
)
def test_a_mistake_is_named_before_any_worker_starts(
    settings: dict[str, Any], message: str, read: Callable[[dict[str, Any]], RunConfig]
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(settings)


def test_what_is_not_offered_is_named() -> None:
    with pytest.raises(NotYetError, match="fsdp_state_dict_type='local_state_dict' was requested"):
        resolve({"fsdp_config": {"fsdp_state_dict_type": "local_state_dict"}}, {})


@pytest.mark.parametrize(
    ("options", "key", "text", "expected"),
    [
        (fsdp.OPTIONS, "version", "3", "FSDP_VERSION is '3', but should be a whole number from 1 to 2"),
        (fsdp.OPTIONS, "offload_params", "perhaps", "FSDP_OFFLOAD_PARAMS is 'perhaps', but should be True or False"),
        (
            deepspeed.OPTIONS,
            "gradient_clipping",
            "much",
            "ACCELERATE_GRADIENT_CLIPPING is 'much', but should be a number",
        ),
        (megatron.OPTIONS, "tp_degree", "0", "MEGATRON_LM_TP_DEGREE is '0', but should be a whole number, at least 1"),
        (parallelism.DEGREES, "cp_attention", "rng", "PARALLELISM_CONFIG_CP_ATTENTION is 'rng', but should be one of"),
    ],
)
def test_a_variable_whose_text_is_no_such_value_is_named(options: Entries, key: str, text: str, expected: str) -> None:
    variable = options.known[options.prefix + key].variable
    with pytest.raises(ConfigurationError, match=f"The variable {expected}"):
        options.read(key, {variable: text})
    # one that is not set, or empty, gives the default
    assert options.read(key, {variable: ""}) == options.read(key, {}) == options.known[options.prefix + key].default
