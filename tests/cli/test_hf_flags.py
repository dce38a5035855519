"""Every flag of Hugging Face's `accelerate launch` is known, with the values that it takes there."""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DynamoBackend, launch

from accelerate_nb.cli import hf_flags
from accelerate_nb.cli.launching import dry_run
from accelerate_nb.cli.launching.request import PROG
from accelerate_nb.cli.main import main
from accelerate_nb.devices.probe import AvailableDevices
from accelerate_nb.errors import AccelerateNbError, ConfigurationError, NotYetError
from accelerate_nb.launching.planning.placement import choose
from tests.cli.launch_requests import request_of

ACTIONS = [item for item in launch_command_parser()._actions if item.option_strings and item.dest != "help"]
# Values that mean something on one machine, where their parser says no more than "an integer" or "a text".
SENSIBLE = {
    "--gpu_ids": "0",
    "--machine_rank": "0",
    "--main_process_ip": "127.0.0.1",
    "--tee": "3",
    "--rdzv_backend": "c10d",
    "--rdzv_conf": "timeout=5,read_timeout=3",
    "--fp8_override_linear_precision": "false,true,false",
    "--config_file": "",
    "--env": "A=1",
    "--fsdp_auto_wrap_policy": "NO_WRAP",
    "--fsdp_state_dict_type": "FULL_STATE_DICT",
    "--offload_optimizer_device": "nvme",
    "--offload_param_device": "cpu",
    "--parallelism_config_sp_seq_length": "8",
    "--parallelism_config_cp_comm_strategy": "alltoall",
}


def long(flag: argparse.Action) -> str:
    """A flag as they document it."""
    return next(name for name in flag.option_strings if name.startswith("--"))


def values(flag: argparse.Action) -> list[str]:
    """Words behind a flag that their parser takes: each choice, or one of its type; none where it takes none."""
    if flag.nargs == 0:
        return []
    if long(flag) in SENSIBLE:
        return [SENSIBLE[long(flag)]]
    if long(flag) == "--dynamo_backend":
        # their list has a name misspelled, which they refuse where they use it
        return [name for name in flag.choices if name.upper() in DynamoBackend.list()]
    return list(flag.choices) if flag.choices else ["1" if flag.type in {int, float} else "true"]


def lines(flag: argparse.Action) -> Iterator[list[str]]:
    """A flag in each of its spellings, with each of its values."""
    for spelling in flag.option_strings:
        for value in values(flag) or [None]:
            yield [spelling] if value is None else [spelling, value]


@pytest.mark.parametrize("flag", ACTIONS, ids=long)
def test_a_flag_of_theirs_is_known_in_every_spelling_with_every_value(flag: argparse.Action) -> None:
    for words in lines(flag):
        launch_command_parser().parse_args([*words, "script.py"])
        # what is not offered is known all the same
        with suppress(NotYetError):
            request_of(*words)


@pytest.mark.parametrize("flag", [item for item in ACTIONS if item.choices], ids=long)
def test_a_value_that_they_refuse_is_refused(flag: argparse.Action) -> None:
    with pytest.raises(SystemExit):
        launch_command_parser().parse_args([long(flag), "nonsense", "script.py"])
    with pytest.raises(ConfigurationError, match="nonsense"):
        request_of(long(flag), "nonsense")


def test_the_table_has_their_flags_and_no_others() -> None:
    # flags for keys of a mapping that Accelerate's does not have
    keys = ("pp_size", "pp_schedule", "pp_num_microbatches", "cp_attention", "tp_loss_parallel")
    own = {f"parallelism_config_{key}" for key in keys}
    known = {item.name for item in hf_flags.FLAGS}
    assert own <= known
    assert {long(item)[2:] for item in ACTIONS} == known - own


def test_what_is_not_offered_is_named() -> None:
    with pytest.raises(NotYetError, match="mpirun"):
        request_of("--mpirun_hostfile", "hosts")


def test_ways_to_train_exclude_each_other_as_they_do_there() -> None:
    with pytest.raises(ValueError, match="only use one of"):
        _validate_launch_command(launch_command_parser().parse_args(["--cpu", "--multi_gpu", "script.py"]))
    for words in ("--cpu --multi_gpu", "--use_deepspeed --use_fsdp", "--use_deepspeed --use_megatron_lm"):
        with pytest.raises(ConfigurationError, match=f"{words.replace(' ', ' and ')} were requested together"):
            request_of(*words.split())


def test_an_option_of_what_was_not_requested_changes_nothing_and_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = request_of("--fsdp_version", "2", "--same_network")
    found.warn_of_unused_flags()
    why = "--fsdp_version changes nothing: it is an option of FSDP, which --use_fsdp requests."
    assert capsys.readouterr().err == f"{PROG}: {why}\n"
    assert list(found.theirs.without_effect(on_tpus=False)) == ["--same_network", "--fsdp_version"]
    assert found.theirs.variables() == {}


def test_an_option_of_what_was_requested_has_an_effect() -> None:
    for words in (["--use_fsdp"], ["--strategy", "fsdp"]):
        found = request_of(*words, "--fsdp_offload_params", "true", "--parallelism_config_dp_shard_size", "2")
        assert list(found.theirs.without_effect(on_tpus=False)) == ["--parallelism_config_dp_shard_size"]
        assert found.settings["fsdp_config"]["fsdp_offload_params"] is True
    # weights are sharded on CPUs too
    assert request_of("--cpu", "--use_fsdp").config.training.strategy == "fsdp"
    with pytest.raises(ConfigurationError, match="--use_fsdp was given, which requests strategy=fsdp, together with"):
        request_of("--use_fsdp", "--strategy", "ddp")


ALONE = ["--num_machines", "1", "--mixed_precision", "no", "--main_process_port", "29500", "--machine_rank", "0"]


def test_deepspeed_gets_the_variables_that_accelerate_sets() -> None:
    words = ["--use_deepspeed", "--num_processes", "1", "--zero_stage", "3", "--gradient_clipping", "0.5"]
    words += ["--offload_param_device", "cpu", "--zero3_init_flag", "true", "--zero3_save_16bit_model", "true"]
    words += ["--gradient_accumulation_steps", "2", "--deepspeed_moe_layer_cls_names", "A,B"]
    arguments = launch_command_parser().parse_args([*words, *ALONE, "script.py"])
    arguments.deepspeed_fields_from_accelerate_config = ""
    _, theirs = launch.prepare_deepspeed_cmd_env(arguments)
    found = request_of(*words)
    assert found.config.training.strategy == "deepspeed"
    ours = found.config.training.environ()
    asked = {name: value for name, value in theirs.items() if "DEEPSPEED" in name or name.startswith("ACCELERATE_GRAD")}
    asked.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    assert asked.items() <= ours.items()


def test_megatron_gets_the_variables_that_accelerate_sets() -> None:
    words = ["--use_megatron_lm", "--num_processes", "4"]
    words += ["--megatron_lm_tp_degree", "2", "--megatron_lm_pp_degree", "2"]
    words += ["--megatron_lm_num_micro_batches", "4", "--megatron_lm_sequence_parallelism", "true"]
    words += ["--megatron_lm_use_distributed_optimizer", "true", "--megatron_lm_context_parallel_size", "1"]
    arguments = launch_command_parser().parse_args([*words, *ALONE, "--dynamo_backend", "no", "script.py"])
    theirs = launch.prepare_multi_gpu_env(arguments)
    found = request_of(*words)
    assert found.config.training.strategy == "megatron"
    ours = found.config.training.environ()
    # theirs are also set to what they are without a variable
    prefixes = ("MEGATRON_LM_", "ACCELERATE_USE_MEGA")
    asked = {name: value for name, value in theirs.items() if name.startswith(prefixes) and value != "False"}
    assert len(asked) > 6
    assert asked.items() <= ours.items()


def test_workers_find_the_variables_that_accelerate_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--cpu", "--num_processes", "1", "--mixed_precision", "bf16", "--debug", "--enable_cpu_affinity"]
    words += ["--dynamo_backend", "eager", "--dynamo_mode", "max-autotune", "--dynamo_use_fullgraph"]
    words += ["--dynamo_use_dynamic", "--num_cpu_threads_per_process", "3"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args([*words, "script.py"]))
    _, theirs = launch.prepare_simple_launcher_cmd_env(arguments)
    found = request_of(*words)
    placed = choose(found.config.launching, AvailableDevices("cpu", "CPU", 0, 2), can_fork=True)
    variables = dry_run.variables(found, placed)
    # they pin all processes to the same cores with the one, and the other goes with it; what was not said is false there
    names = {name for name in theirs if theirs[name] != os.environ.get(name)} - {"KMP_AFFINITY", "KMP_BLOCKTIME"}
    expected = {name: {"1": "true"}.get(theirs[name], theirs[name].lower()) for name in names}
    assert {name: variables.get(name, "false").lower() for name in expected} == expected
    assert expected["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert expected["OMP_NUM_THREADS"] == "3"


def test_options_of_fp8_are_the_variables_that_accelerate_sets() -> None:
    words = ["--fp8_backend", "te", "--fp8_margin", "2", "--fp8_interval", "3"]
    words += ["--fp8_format", "E4M3", "--fp8_opt_level", "O1"]
    words += ["--fp8_amax_history_len", "16", "--fp8_amax_compute_algo", "max", "--fp8_use_autocast_during_eval"]
    words += ["--fp8_override_linear_precision", "false,true,false", "--fp8_pad_inner_dim", "false"]
    words += ["--fp8_enable_fsdp_float8_all_gather", "true"]
    variables = launch.setup_fp8_env(launch_command_parser().parse_args([*words, "script.py"]), {})
    # argparse gives their store_true a True, and their str_to_bool a 1
    plain = {"1": "True", "0": "False"}
    yes_no = {name for name in variables if "PAD" in name or "GATHER" in name or "OVERRIDE" in name}
    expected = {name: plain.get(value, value) if name in yes_no else value for name, value in variables.items()}
    assert request_of(*words).theirs.variables() == expected


def test_options_of_fp8_in_a_file_are_accelerates_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_FP8_MARGIN", raising=False)
    path = tmp_path / "fp8.yaml"
    fp8 = {"backend": "AO", "pad_inner_dim": False, "enable_fsdp_float8_all_gather": True, "fp8_format": "HYBRID"}
    fp8 |= {"override_linear_precision": [False, True, False], "use_autocast_during_eval": False, "margin": 2}

    def variables(*words: str, precision: str = "fp8") -> dict[str, str]:
        path.write_text(json.dumps({"mixed_precision": precision, "fp8_config": fp8}))
        return request_of("--config_file", str(path), *words).theirs.variables()

    names = {key if key.startswith("fp8_") else f"fp8_{key}": value for key, value in fp8.items()}
    expected = launch.setup_fp8_env(argparse.Namespace(**names), {})
    assert len(expected) == len(fp8) + 2
    found = variables()
    assert {**found, "ACCELERATE_FP8_BACKEND": found["ACCELERATE_FP8_BACKEND"].upper()} == expected
    # a flag wins, and so does a variable; without fp8 they mean nothing
    assert variables("--fp8_pad_inner_dim", "true")["ACCELERATE_FP8_PAD_INNER_DIM"] == "True"
    assert variables(precision="bf16") == {}
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "3")
    assert "ACCELERATE_FP8_MARGIN" not in variables()
    # the choice of the package stays open
    fp8["backend"] = "AUTO"
    assert "ACCELERATE_FP8_BACKEND" not in variables()
    fp8["margins"] = 2
    with pytest.raises(ConfigurationError, match=r"There is no key 'fp8_margins'\. Did you mean fp8_margin\?"):
        variables()


def test_a_mistake_reaches_the_person_as_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--fsdp_version", "3", "script.py"]) == 2
    assert capsys.readouterr().err == (
        "accelerate-nb: --fsdp_version was given '3', but should be a whole number from 1 to 2. Pass such a value, or leave it out.\n"
    )
    assert issubclass(NotYetError, AccelerateNbError)
