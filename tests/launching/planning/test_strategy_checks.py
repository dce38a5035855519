"""What a launch with DeepSpeed or Megatron can know to fail is refused before any worker starts."""

from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb.config.run_config import resolve
from accelerate_nb.errors import LaunchError, MissingExtraError, NotYetError
from accelerate_nb.launching.planning import placement
from accelerate_nb.launching.planning.placement import Placement, check_training

TO_A_DISK = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/tmp"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages are there."""
    monkeypatch.setattr(placement, "find_spec", lambda name: ModuleSpec(name, None))


def deepspeed(kind: str = "cpu", axes: dict[str, int] | None = None, **options: Any) -> None:
    settings = {"strategy": "deepspeed", "deepspeed_config": options, "parallelism_config": axes or {}}
    placement.check_deepspeed(resolve(settings, {}).training, kind)


def megatron(kind: str = "cuda", size: int = 4, **options: Any) -> None:
    config = resolve({"strategy": "megatron", "megatron_lm_config": options}, {})
    placement.check_megatron(config.training, kind, size)


@pytest.mark.parametrize("check", [deepspeed, megatron])
def test_a_missing_package_names_its_extra(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'accelerate-nb\[{check.__name__}\]'"):
        check()


@pytest.mark.parametrize(
    ("check", "settings", "message"),
    [
        (deepspeed, {"kind": "xla"}, "on XLA devices"),
        (deepspeed, {"deepspeed_config_file": __file__, "zero_stage": 3}, "zero_stage beside deepspeed_config_file"),
        (deepspeed, {"deepspeed_config_file": "nowhere.json"}, "'nowhere.json' was requested, which is no file"),
        (deepspeed, {"axes": {"tp_size": 2, "pp_size": 2}}, "by pp and tp"),
        (deepspeed, {"offload_param_device": "nvme"}, "Pass offload_param_nvme_path"),
        (megatron, {"kind": "cpu"}, "on cpu devices"),
        (megatron, {"tp_degree": 2, "pp_degree": 4}, "product is 8, which does not divide 4 processes"),
        (megatron, {"context_parallel_size": 3}, "product is 3"),
    ],
)
def test_what_does_not_go_together_is_named(check: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        check(**settings)


@pytest.mark.parametrize("option", ["no_save_optim", "use_custom_fsdp"])
def test_an_option_of_megatron_that_is_not_offered_is_named(option: str) -> None:
    with pytest.raises(NotYetError, match=f"has {option}, which is not offered"):
        megatron(tp_degree=2, **{option: True})


def test_a_missing_libaio_reports_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    # a compiler that finds no header
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    file = tmp_path / "ds_config.json"
    file.write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}}')
    for options in (TO_A_DISK, {"deepspeed_config_file": str(file)}):
        with pytest.raises(LaunchError, match="apt-get install libaio-dev"):
            deepspeed(**options)
    # what is compiled needs no header
    (tmp_path / "async_io").mkdir()
    (tmp_path / "async_io" / "async_io.so").touch()
    deepspeed(**TO_A_DISK)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_sequences_are_split_by_deepspeed_alone(strategy: str) -> None:
    two, config = Placement("supervisor", 2, True, ""), {"parallelism_config": {"sp_size": 2}}
    message = f"{{sp_size: 2}} was requested with strategy='{strategy}', but DeepSpeed alone"
    with pytest.raises(LaunchError, match=message):
        check_training(resolve({"strategy": strategy, **config}, {}), two)
    # the code of a rank may have a plugin
    check_training(resolve(config, {}), two)


def test_what_goes_together_is_let_through() -> None:
    deepspeed(zero_stage=3, offload_param_device="cpu")
    deepspeed(deepspeed_config_file=__file__, zero3_init_flag=True)
    deepspeed(axes={"sp_size": 2, "dp_shard_size": 2})
    megatron(tp_degree=2, pp_degree=2, sequence_parallelism=True, num_micro_batches=4, hidden_dropout=0.1)
    megatron(tp_degree=2, use_distributed_optimizer="true", size=8)
    # the code of a rank may split layers
    megatron(sequence_parallelism=True)
