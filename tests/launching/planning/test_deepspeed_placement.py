"""What a launch with DeepSpeed can know to fail is refused before any worker starts."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from accelerate_nb.config.run_config import resolve
from accelerate_nb.devices import async_io
from accelerate_nb.errors import LaunchError, MissingExtraError
from accelerate_nb.launching.planning import placement
from accelerate_nb.launching.planning.placement import Placement, check_training


def check(kind: str = "cpu", **settings: Any) -> None:
    config = resolve({"strategy": "deepspeed", **settings}, {})
    placement.check_deepspeed(config.training, kind)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'accelerate-nb\[deepspeed\]'"):
        check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "xla"}, "on XLA devices"),
        (
            {"deepspeed_config": {"deepspeed_config_file": __file__, "zero_stage": 3}},
            "zero_stage beside deepspeed_config_file",
        ),
        (
            {"deepspeed_config": {"deepspeed_config_file": "nowhere.json"}},
            "'nowhere.json' was requested, which is no file",
        ),
        ({"parallelism_config": {"tp_size": 2, "pp_size": 2}}, "by pp and tp"),
    ],
)
def test_what_does_not_go_together_is_named(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda name: ModuleSpec(name, None))
    with pytest.raises(LaunchError, match=message):
        check(**settings)


TO_A_DISK = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/tmp"}


def test_an_offload_to_a_disk_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(async_io, "missing_library", lambda: None)
    with pytest.raises(LaunchError, match="Pass offload_param_nvme_path"):
        check(deepspeed_config={"offload_param_device": "nvme"})
    check(deepspeed_config=TO_A_DISK)


def test_a_missing_libaio_reports_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda name: ModuleSpec(name, None))
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
            check(deepspeed_config=options)
    # what is compiled needs no header
    (tmp_path / "async_io").mkdir()
    (tmp_path / "async_io" / "async_io.so").touch()
    check(deepspeed_config=TO_A_DISK)


def test_sequences_are_split_by_deepspeed_alone() -> None:
    placement = Placement("workers", 2, True, "")
    for strategy in ("fsdp", "ddp"):
        config = resolve({"strategy": strategy, "parallelism_config": {"sp_size": 2}}, {})
        with pytest.raises(
            LaunchError, match=f"{{sp_size: 2}} was requested with strategy='{strategy}', but DeepSpeed alone"
        ):
            check_training(config, placement)
    # the code of a rank may have a plugin
    check_training(resolve({"parallelism_config": {"sp_size": 2}}, {}), placement)


def test_what_goes_together_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda name: ModuleSpec(name, None))
    check(deepspeed_config={"zero_stage": 3, "offload_param_device": "cpu"})
    check(deepspeed_config={"deepspeed_config_file": __file__, "zero3_init_flag": True})
    check(parallelism_config={"sp_size": 2, "dp_shard_size": 2})
