"""The settings of FSDP are Accelerate's for version 2; those of version 1 get their equals, or are refused by name."""

import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import accelerate.utils as theirs
import pytest
import torch
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

import accelerate_nb.utils as ours
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.utils import FullyShardedDataParallelPlugin
from tests.runtime.strategies.test_fsdp_as_accelerate import Net

BF16, FP32 = torch.bfloat16, torch.float32
POLICY = {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ, "ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"]:
        if name.startswith("FSDP_") or name == "ACCELERATE_USE_FSDP":
            # set first, so that it is put back even where it was not there
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)


def attributes(plugin_class: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The values of a plugin's fields, or that it is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plugin = plugin_class(**given)
        except (ValueError, KeyError):
            return "refused"
    found = {field.name: getattr(plugin, field.name) for field in fields(theirs.FullyShardedDataParallelPlugin)}
    # Accelerate pins memory on machines without a device too, where torch refuses it
    return {**found, "cpu_offload": type(found["cpu_offload"])}


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"reshard_after_forward": True},
    {"reshard_after_forward": False},
    {"reshard_after_forward": "false"},
    {"reshard_after_forward": "0"},
    {"reshard_after_forward": "1"},
    {"reshard_after_forward": 3},
    {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False},
    {"backward_prefetch": "backward_pre"},
    {"backward_prefetch": "NO_PREFETCH"},
    {"backward_prefetch": "sometimes"},
    {"mixed_precision_policy": "bf16"},
    {"mixed_precision_policy": "fp16"},
    {"mixed_precision_policy": "fp8"},
    {"mixed_precision_policy": "fp17"},
    {"mixed_precision_policy": POLICY},
    {"mixed_precision_policy": {"param_dtype": BF16}},
    {"mixed_precision_policy": {**POLICY, "reduce_dtype": torch.float64}},
    {"mixed_precision_policy": MixedPrecisionPolicy(param_dtype=BF16)},
    {"auto_wrap_policy": "transformer_based_wrap"},
    {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Linear"]},
    {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "Linear,Conv1d"},
    {"auto_wrap_policy": "size_based_wrap"},
    {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100},
    {"auto_wrap_policy": "size_based_wrap", "min_num_params": "100"},
    {"auto_wrap_policy": "no_wrap", "min_num_params": 7},
    {"auto_wrap_policy": size_based_auto_wrap_policy},
    {"auto_wrap_policy": "other"},
    {"cpu_offload": True},
    {"cpu_offload": False},
    {"cpu_offload": OffloadPolicy()},
    {"cpu_offload": "yes"},
    {"ignored_modules": "a|b"},
    {"state_dict_type": "FULL_STATE_DICT"},
    {"state_dict_type": "sharded_state_dict"},
    {"state_dict_type": "1"},
    {"state_dict_type": StateDictType.FULL_STATE_DICT},
    {"state_dict_type": "LOCAL_STATE_DICT"},
    {"state_dict_type": "other"},
    {"limit_all_gathers": False},
    {"use_orig_params": True},
    {"sync_module_states": True},
    {"param_init_fn": print},
    {"activation_checkpointing": True, "activation_checkpointing_offload": True},
    {"activation_checkpointing_offload": True},
    {"cpu_ram_efficient_loading": True},
]


@pytest.mark.parametrize("given", ARGUMENTS)
def test_the_values_of_version_2_are_accelerates(given: dict[str, Any]) -> None:
    given = {"fsdp_version": 2, **given}
    expected = attributes(theirs.FullyShardedDataParallelPlugin, given)
    assert attributes(FullyShardedDataParallelPlugin, given) == expected


ENVIRONMENTS: list[dict[str, str]] = [
    {},
    {"RESHARD_AFTER_FORWARD": "false"},
    {"RESHARD_AFTER_FORWARD": "True", "SHARDING_STRATEGY": "SHARD_GRAD_OP"},
    {"OFFLOAD_PARAMS": "true"},
    {"OFFLOAD_PARAMS": "maybe"},
    {"BACKWARD_PREFETCH": "BACKWARD_PRE", "FORWARD_PREFETCH": "false"},
    {"STATE_DICT_TYPE": "FULL_STATE_DICT"},
    {"STATE_DICT_TYPE": "LOCAL_STATE_DICT"},
    {"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "TRANSFORMER_CLS_TO_WRAP": "BertLayer,Other"},
    {"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "MIN_NUM_PARAMS": "2000"},
    {"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"},
    {"AUTO_WRAP_POLICY": "NO_WRAP", "MIN_NUM_PARAMS": "2000"},
    {"AUTO_WRAP_POLICY": "OTHER"},
    {"USE_ORIG_PARAMS": "true", "SYNC_MODULE_STATES": "true", "CPU_RAM_EFFICIENT_LOADING": "true"},
    {"ACTIVATION_CHECKPOINTING": "true", "ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
    {"ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
    {"IGNORED_MODULES": "head.*"},
]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("given", [{}, {"reshard_after_forward": True, "state_dict_type": "SHARDED_STATE_DICT"}])
def test_the_variables_mean_the_same(
    environment: dict[str, str], given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"VERSION": "2", **environment}.items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    expected = attributes(theirs.FullyShardedDataParallelPlugin, given)
    assert attributes(FullyShardedDataParallelPlugin, given) == expected


def test_transformers_learns_who_loads_weights_and_that_is_switched_as_in_accelerate() -> None:
    for is_efficient in (True, False):
        FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=is_efficient)
        assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == str(is_efficient)
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    seen: list[Any] = []
    for package in (ours, theirs):
        for switch in (package.enable_fsdp_ram_efficient_loading, package.disable_fsdp_ram_efficient_loading):
            switch()
            seen.append([os.environ.get(name) for name in names])
        for name in names:
            del os.environ[name]
    assert seen[:2] == seen[2:]


class Model(Net):
    _no_split_modules = ("Block",)


@pytest.mark.parametrize(
    "given",
    [
        {"auto_wrap_policy": "transformer_based_wrap"},
        {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 50},
        {"auto_wrap_policy": "size_based_wrap"},
        {"auto_wrap_policy": "no_wrap"},
    ],
)
def test_a_policy_is_completed_for_a_model_as_in_accelerate_and_a_class_that_it_lacks_is_named(
    given: dict[str, Any],
) -> None:
    described = []
    for package in (ours, theirs):
        plugin = package.FullyShardedDataParallelPlugin(fsdp_version=2, **given)
        plugin.set_auto_wrap_policy(Model())
        policy = plugin.auto_wrap_policy
        described.append(policy and (policy.func, policy.keywords))
    assert described[0] == described[1]
    by_class = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Blok"]}
    with pytest.raises(ConfigurationError, match=r"The layer class Blok .* Did you mean Block\?"):
        FullyShardedDataParallelPlugin(**by_class).set_auto_wrap_policy(Model())


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "fp32", BF16])
@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(param_dtype=FP32)])
def test_a_precision_becomes_the_same_policy(name: Any, override: bool, policy: Any) -> None:
    found = []
    for package in (ours, theirs):
        plugin = package.FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)
        plugin.set_mixed_precision(name, override=override)
        found.append(plugin.mixed_precision_policy)
    assert found[0] == found[1]


def test_offloaded_weights_are_pinned_only_for_a_gpu() -> None:
    for requested in (True, CPUOffloadPolicy(), CPUOffload(offload_params=True)):
        policy = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=requested).cpu_offload
        assert isinstance(policy, CPUOffloadPolicy)
        assert policy.pin_memory is torch.cuda.is_available()


@pytest.mark.parametrize(
    ("strategy", "reshards", "is_hybrid"),
    [
        ("FULL_SHARD", True, False),
        ("shard_grad_op", False, False),
        ("2", False, False),
        (ShardingStrategy.HYBRID_SHARD, True, True),
        ("HYBRID_SHARD_ZERO2", False, True),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", ["sharding_strategy", "reshard_after_forward"])
@pytest.mark.filterwarnings("ignore:fsdp_version=1")
def test_a_strategy_of_version_1_has_its_equal(
    strategy: Any, reshards: bool, is_hybrid: bool, version: int, name: str
) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **{name: strategy})
    assert (plugin.reshard_after_forward, plugin.hybrid_shard) == (reshards, is_hybrid)
    assert (plugin.fsdp_version, plugin.requested_version) == (2, version)


@pytest.mark.parametrize(
    ("environment", "reshards"),
    [
        ({}, True),
        ({"SHARDING_STRATEGY": "SHARD_GRAD_OP", "RESHARD_AFTER_FORWARD": "true"}, False),
        # as Accelerate's questionnaire and launcher set them
        ({"SHARDING_STRATEGY": "FULL_SHARD", "RESHARD_AFTER_FORWARD": "shard_grad_op"}, False),
        ({"SHARDING_STRATEGY": "FULL_SHARD", "RESHARD_AFTER_FORWARD": "true"}, True),
    ],
)
def test_the_variables_of_version_1_have_their_equals(
    environment: dict[str, str], reshards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    assert FullyShardedDataParallelPlugin().reshard_after_forward is reshards


def test_a_plugin_of_version_1_keeps_its_checkpoints_whole_and_its_precision_has_its_equal() -> None:
    assert FullyShardedDataParallelPlugin().state_dict_type is StateDictType.FULL_STATE_DICT
    dtypes = {"param_dtype": BF16, "reduce_dtype": FP32, "buffer_dtype": BF16}
    for policy in (MixedPrecision(**dtypes), dtypes):
        plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
        assert plugin.mixed_precision_policy == MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)


def test_arguments_without_effect_are_named_in_one_warning() -> None:
    with pytest.warns(UserWarning, match="forward_prefetch changes nothing.*use_orig_params changes nothing") as found:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, forward_prefetch=True, use_orig_params=False, limit_all_gathers=False
        )
    assert (plugin.forward_prefetch, plugin.use_orig_params) == (None, None)
    assert [warning.filename for warning in found] == [__file__]


def test_version_1_is_named_where_it_was_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="fsdp_version=1 was requested"):
        FullyShardedDataParallelPlugin(fsdp_version=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FullyShardedDataParallelPlugin()
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.warns(UserWarning, match="fsdp_version=1 was requested"):
        FullyShardedDataParallelPlugin()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fsdp_version": 3}, "fsdp_version is 3.* the versions 1 and 2"),
        ({"auto_wrap_policy": "transformer_wrap"}, r"Did you mean TRANSFORMER_BASED_WRAP\?"),
        ({"state_dict_type": "SHARDED_STATE"}, r"Did you mean SHARDED_STATE_DICT\?"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "LOCAL_STATE_DICT was requested.*'FULL_STATE_DICT'"),
        ({"sharding_strategy": "NO_SHARD"}, "NO_SHARD was requested.* Train with DDP"),
        ({"sharding_strategy": "NO_SHARD", "fsdp_version": 2}, "NO_SHARD was requested.* Train with DDP"),
        ({"sharding_strategy": "FULLY_SHARD"}, r"Did you mean FULL_SHARD\?"),
        ({"activation_checkpointing_offload": True}, "Pass activation_checkpointing=True as well"),
    ],
)
def test_a_wrong_value_is_named_with_what_to_do(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FullyShardedDataParallelPlugin(**given)


def test_a_plugin_can_go_to_another_process() -> None:
    given = {"auto_wrap_policy": "size_based_wrap", "mixed_precision_policy": "bf16"}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **given)
    assert vars(pickle.loads(pickle.dumps(plugin))) == vars(plugin)
