"""What is not offered yet has Accelerate's parameters, and says so when it is used."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import accelerate.utils as theirs
import pytest
from accelerate.parallelism_config import ParallelismConfig as TheirConfig

import accelerate_nb.utils as ours
from accelerate_nb import Accelerator
from accelerate_nb.errors import NotYetError
from accelerate_nb.inference import build_pipeline, pippy_forward
from accelerate_nb.runtime.world.world import Mesh
from accelerate_nb.utils import dataclasses
from accelerate_nb.utils.deepspeed import get_active_deepspeed_plugin
from tests.peers import Peer, under_both

SETTINGS = [
    *("DeepSpeedPlugin", "DeepSpeedSequenceParallelConfig", "FullyShardedDataParallelPlugin", "MegatronLMPlugin"),
    *("ParallelismConfig", "TorchContextParallelConfig", "TorchTensorParallelConfig", "TorchTensorParallelPlugin"),
]
UNSUPPORTED = [
    *(ours.ensure_weights_retied, build_pipeline, pippy_forward),
    *(dataclasses.parse_glm4_moe_config, dataclasses.parse_bert_config, dataclasses.parse_t5_config),
    *(ours.add_model_config_to_megatron_parser, ours.BertTrainStep, ours.T5TrainStep),
]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_can_be_made_and_have_the_same_fields_with_the_same_defaults(name: str) -> None:
    # what there is here alone is passed by its name alone
    mine, expected = (
        {field.name: default(field) for field in fields(getattr(package, name)) if field.init and not field.kw_only}
        for package in (ours, theirs)
    )
    assert list(mine.items()) == list(expected.items())
    getattr(ours, name)()


def default(field: Any) -> Any:
    return field.default if field.default is not MISSING else field.default_factory


@pytest.mark.parametrize("function", UNSUPPORTED)
def test_a_name_that_is_not_offered_yet_is_an_error(function: Callable[..., Any]) -> None:
    wanted = inspect.signature(function).parameters.values()
    needed = [None for item in wanted if item.default is item.empty and item.kind is item.POSITIONAL_OR_KEYWORD]
    with pytest.raises(NotYetError, match="which is not offered here yet"):
        function(*needed)


def test_what_needs_deepspeed_is_refused_without_it() -> None:
    state = Accelerator(cpu=True).state
    for ask in (ours.deepspeed_required(print), lambda: get_active_deepspeed_plugin(state)):
        with pytest.raises(ValueError, match="DeepSpeed"):
            ask()


NAMES = [
    *("dp_dim_names", "non_dp_dim_names", "dp_shard_cp_dim_names", "dp_cp_dim_names", "fsdp_dim_names"),
    *("active_mesh_dims", "total_size", "data_parallel_size", "non_data_parallel_size"),
    *(f"{axis}_enabled" for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")),
    *("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "cp_backend", "sp_backend"),
]


@pytest.mark.parametrize(
    "sizes",
    [
        *({}, {"dp_replicate_size": 2}, {"tp_size": 2}, {"dp_shard_size": 4, "tp_size": 2}),
        *({"cp_size": 2, "tp_size": 3}, {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 3}),
        *({"sp_size": 2, "dp_shard_size": 2}, {"cp_size": 2, "sp_size": 2}, {"tp_size": 2, "dp_replicate_size": 2}),
        *({"tp_size": 0}, {"dp_shard_size": -1}, {"cp_backend": "other"}, {"sp_backend": "torch"}),
    ],
)
def test_sizes_mean_the_same_also_in_the_environment(sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert described(ours.ParallelismConfig, sizes) == described(TheirConfig, sizes)
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    assert described(ours.ParallelismConfig, sizes) == described(TheirConfig, sizes)


HANDLED: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("TorchContextParallelConfig", {}, {}),
    ("TorchContextParallelConfig", {}, {"cp_comm_strategy": "alltoall"}),
    ("TorchContextParallelConfig", {"CP_COMM_STRATEGY": "alltoall"}, {}),
    ("TorchContextParallelConfig", {"CP_COMM_STRATEGY": "other"}, {}),
    ("DeepSpeedSequenceParallelConfig", {}, {}),
    ("DeepSpeedSequenceParallelConfig", {}, {"sp_seq_length_is_variable": False}),
    ("DeepSpeedSequenceParallelConfig", {"SP_SEQ_LENGTH": "8"}, {"sp_seq_length_is_variable": False}),
    ("DeepSpeedSequenceParallelConfig", {"SP_SEQ_LENGTH": "None"}, {"sp_seq_length_is_variable": False}),
    ("DeepSpeedSequenceParallelConfig", {"SP_SEQ_LENGTH_IS_VARIABLE": "false"}, {"sp_seq_length": 4}),
    ("DeepSpeedSequenceParallelConfig", {"SP_ATTN_IMPLEMENTATION": "sdpa"}, {}),
    ("DeepSpeedSequenceParallelConfig", {}, {"sp_attn_implementation": "kernels-community/flash-attn2"}),
    ("DeepSpeedSequenceParallelConfig", {}, {"sp_attn_implementation": "eager"}),
]


@pytest.mark.parametrize(("name", "environment", "given"), HANDLED)
def test_the_ways_to_split_a_sequence_are_accelerates(
    name: str, environment: dict[str, str], given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{variable}", value)
    found, wanted = (settled(lambda item=item: vars(getattr(item, name)(**given))) for item in (ours, theirs))
    # the ways that Accelerate does not have are by keyword alone
    assert found == wanted or {key: found[key] for key in wanted} == wanted


def settled(function: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """What a call gives, or that it is refused."""
    try:
        return function(*args, **given)
    except ValueError:
        return "refused"


def described(config_class: Any, sizes: dict[str, Any]) -> Any:
    config = settled(config_class, **sizes)
    if config == "refused":
        return config
    handlers = [type(getattr(config, f"{axis}_handler")).__name__ for axis in ("tp", "cp", "sp")]
    axes = config._get_mesh() if config.active_mesh_dims else None
    return {name: getattr(config, name) for name in NAMES}, handlers, axes


def meshes(peer: Peer) -> list[Any]:
    """The axes of meshes over four processes, this process's place along each, and the sizes of the joint ones."""
    seen: list[Any] = []
    state = peer.PartialState()
    halves = [{"dp_shard": 2, other: 2} for other in ("tp", "dp_replicate", "cp")]
    for sizes in ({"dp_shard": 4}, *halves, {"sp": 4}):
        mesh = peer.ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()}).build_device_mesh("cpu")
        if mesh is None:
            seen.append("no mesh")
            continue
        places = {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names}
        seen.append([*places.items()])
        assert not peer.is_ours or Mesh(**sizes).coordinates(state.process_index) == places
        for joint in ("dp", "dp_shard_cp", "dp_cp"):
            seen.append((joint, mesh[joint].size(), mesh[joint].get_local_rank()))
    config = peer.ParallelismConfig(dp_shard_size=4)
    for device in (None, "cpu", None, "cuda"):
        seen.append(settled(config.get_device_mesh, device) == "refused")
    state.destroy_process_group()
    return seen


def test_a_mesh_has_the_same_axes() -> None:
    both = under_both(meshes, 4)
    assert both.ours == both.theirs
    assert both.ours[3][-4:] == [True, False, False, True]
