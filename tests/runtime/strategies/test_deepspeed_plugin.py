"""The settings of DeepSpeed mean what they mean to Accelerate, key by key; none of this needs the package."""

import base64
import json
from copy import deepcopy
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import accelerate.utils as theirs
import pytest
from accelerate.utils.deepspeed import HfDeepSpeedConfig as TheirConfig

import accelerate_nb.utils as ours
from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError, MissingExtraError, NotYetError
from accelerate_nb.utils.deepspeed import HfDeepSpeedConfig

ZERO3: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
        "offload_param": {"device": "cpu"},
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": [0.9, 0.999]}},
}
STAGE1: dict[str, Any] = {"zero_optimization": {"stage": 1}}
TABLE: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    *(({"zero_stage": stage}, {}) for stage in range(4)),
    ({"gradient_accumulation_steps": 4, "gradient_clipping": 0.5}, {}),
    ({"gradient_clipping": 0.0}, {}),
    ({"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/nvme", "zero_stage": 3}, {}),
    ({"offload_param_device": "cpu", "zero_stage": 3, "zero3_save_16bit_model": True}, {}),
    ({"zero_stage": 3, "zero3_init_flag": False}, {}),
    ({"zero_stage": 1, "zero3_init_flag": True}, {}),
    ({"hf_ds_config": ZERO3}, {}),
    ({"hf_ds_config": ZERO3, "zero_stage": 2, "gradient_clipping": 2.0, "offload_optimizer_device": "cpu"}, {}),
    ({"hf_ds_config": {"zero_optimization": {"stage": 1}}}, {}),
    ({"hf_ds_config": STAGE1}, {"ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,zero3_init_flag"}),
    ({"hf_ds_config": {"train_batch_size": 4}}, {}),
    ({"hf_ds_config": "no_such_file.json"}, {}),
    ({"hf_ds_config": "zero3.json"}, {}),
    ({"hf_ds_config": json.dumps(ZERO3)}, {}),
    ({"hf_ds_config": base64.urlsafe_b64encode(json.dumps(ZERO3).encode()).decode()}, {}),
    ({}, {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false"}),
    ({}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3", "ACCELERATE_GRADIENT_CLIPPING": "0.25"}),
    (
        {},
        {
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/here",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
            "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        },
    ),
    ({"zero_stage": 2}, {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}),
]


def plugin_of(package: Any, settings: dict[str, Any]) -> Any:
    """All that a plugin says, or that it is refused."""
    try:
        plugin = package.DeepSpeedPlugin(**deepcopy(settings))
    except (ValueError, NotImplementedError):
        return "refused"
    values = {field.name: getattr(plugin, field.name) for field in fields(plugin) if field.name != "hf_ds_config"}
    seen = [values, plugin.deepspeed_config, plugin.selected, plugin.is_zero3_init_enabled()]
    return [*seen, plugin.is_auto("gradient_clipping"), plugin.get_value("zero_optimization.stage", "none")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", range(len(TABLE)))
def test_a_plugin_is_accelerates_key_by_key_also_of_a_file(
    row: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings, environment = TABLE[row]
    monkeypatch.chdir(tmp_path)
    Path("zero3.json").write_text(json.dumps(ZERO3), encoding="utf-8")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert plugin_of(ours, settings) == plugin_of(theirs, settings)


def test_a_configuration_is_read_of_a_path_and_refused_of_another_object(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(ZERO3), encoding="utf-8")
    assert ours.DeepSpeedPlugin(hf_ds_config=path).deepspeed_config["zero_optimization"]["stage"] == 3
    with pytest.raises(ConfigurationError, match="configuration was given as 5, which is no file that exists"):
        ours.DeepSpeedPlugin(hf_ds_config=5)


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ({"enable_msamp": True, "msamp_opt_level": "O2"}, "TE"),
        ({"hf_ds_config": {**STAGE1, "msamp": {"enabled": True, "opt_level": "O2"}}}, "TE"),
        ({}, "MSAMP"),
        # as a launcher's --fp8_backend gives it
        ({}, "msamp"),
    ],
)
def test_ms_amp_is_refused_by_name(settings: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
    with pytest.raises(NotYetError, match="MS-AMP was requested with DeepSpeed"):
        ours.DeepSpeedPlugin(zero_stage=1, **settings)


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16", "fp8"])
@pytest.mark.parametrize(
    "config",
    [
        STAGE1,
        ZERO3,
        *({**STAGE1, name: {"enabled": on}} for name, on in (("fp16", True), ("bf16", True), ("bf16", False))),
    ],
)
def test_a_precision_is_written_as_accelerate_writes_it(config: dict[str, Any], precision: str) -> None:
    settings = {"hf_ds_config": config}
    found, wanted = (changed(package, settings, "set_mixed_precision", precision) for package in (ours, theirs))
    assert found == wanted


def changed(package: Any, settings: dict[str, Any], method: str, *args: Any, **options: Any) -> Any:
    """The configuration after a call of a method, or that it is refused."""
    plugin = package.DeepSpeedPlugin(**deepcopy(settings))
    try:
        getattr(plugin, method)(*args, **options)
    except ValueError:
        return "refused"
    return plugin.deepspeed_config


FILLED: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "zero_optimization.reduce_bucket_size": 64,
    "zero_optimization.offload_optimizer.device": "none",
    "optimizer.params.lr": 1e-3,
    "optimizer.params.weight_decay": 0.1,
}


@pytest.mark.parametrize("must_match", [True, False])
@pytest.mark.parametrize(
    "values",
    [
        FILLED,
        {**FILLED, "zero_optimization.stage": 2},
        {"gradient_clipping": 1.0},
        {**FILLED, "optimizer.params.betas": [0.8, 0.9]},
    ],
)
def test_values_take_the_place_of_auto_as_in_accelerate(values: dict[str, Any], must_match: bool) -> None:
    in_bf16 = {"bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0}}
    settings = {"hf_ds_config": ZERO3 | in_bf16, "gradient_accumulation_steps": 2}
    options = {"must_match": must_match, **values}
    found, wanted = (changed(package, settings, "deepspeed_config_process", **options) for package in (ours, theirs))
    assert found == wanted


KEYS = ["zero_optimization.stage", "zero_optimization.offload_param.device", "bf16.enabled", "no.such.key", "optimizer"]


def test_a_configuration_is_read_by_dotted_keys_as_in_accelerate() -> None:
    def seen(config: Any) -> list[Any]:
        found = [[config.find_config_node(key), config.get_value(key, "x")] for key in KEYS]
        found += [[config.is_true(key), config.is_false(key)] for key in KEYS]
        found += [[config.is_zero2(), config.is_zero3(), config.is_offload()]]
        config.del_config_sub_tree("optimizer.params")
        config.del_config_sub_tree("no.such.key")
        return [*found, config.config]

    assert seen(HfDeepSpeedConfig(ZERO3)) == seen(TheirConfig(ZERO3))
    with pytest.raises(ConfigurationError, match="no such entry"):
        HfDeepSpeedConfig(ZERO3).del_config_sub_tree("no.such.key", must_exist=True)


def test_a_plugin_is_selected_by_the_state_alone_and_refused_beside_another_strategy_by_name() -> None:
    plugin = ours.DeepSpeedPlugin()
    with pytest.raises(ConfigurationError, match="select_deepspeed_plugin"):
        plugin.select()
    with pytest.raises(ConfigurationError, match="DeepSpeed was requested with an fsdp_plugin"):
        Accelerator(cpu=True, deepspeed_plugin=plugin, fsdp_plugin=ours.FullyShardedDataParallelPlugin(fsdp_version=2))
    with pytest.raises(ConfigurationError, match="DeepSpeed was requested with strategy='ddp'"):
        Accelerator(cpu=True, deepspeed_plugin=plugin, strategy="ddp")
    with pytest.raises(ConfigurationError, match="must be a DeepSpeedPlugin object"):
        Accelerator(cpu=True, deepspeed_plugin={"zero_stage": 3})


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed here")
@pytest.mark.parametrize("arguments", [{"strategy": "deepspeed"}, {"deepspeed_plugin": ours.DeepSpeedPlugin()}])
def test_a_missing_package_names_its_extra(arguments: dict[str, Any]) -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'accelerate-nb\[deepspeed\]'"):
        Accelerator(cpu=True, **arguments)


@pytest.mark.parametrize(
    "text", ["x" * 3_000_000, '{"a": ' * 5000, '{"a": ' * 60 + "1" + "}" * 60, '{"a": ' + "9" * 5000 + "}"]
)
def test_a_configuration_that_no_person_writes_is_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    for source in (text, str(path)):
        with pytest.raises(
            ConfigurationError, match=r"no JSON with keys of at most 50,000 characters and 50 levels"
        ) as caught:
            HfDeepSpeedConfig(source)
        assert len(str(caught.value)) < 1000
