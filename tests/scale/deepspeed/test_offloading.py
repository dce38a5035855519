"""Optimizer states and weights in host memory, the operators that DeepSpeed compiles for them, and experts that are gathered whole."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_nb import Accelerator
from accelerate_nb.devices import async_io
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.strategies.deepspeed import preparation
from accelerate_nb.utils import DeepSpeedPlugin
from tests.ranks import run_on_ranks
from tests.runtime.strategies.contract import ADAMW_ROUNDING, ROUNDING, difference
from tests.scale.deepspeed.zero import LIMIT, outcomes


def offloaded(stage: int, force: bool) -> dict[str, Any]:
    """The arguments of `Accelerator`; with `force` DeepSpeed's own optimizer, which it compiles, computes in host memory."""
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto", "zero_force_ds_cpu_optimizer": force}
    config["gradient_accumulation_steps"] = "auto"
    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)}


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_in_host_memory_ends_in_the_weights_of_one_process(stage: int, tmp_path: Path) -> None:
    assert difference(outcomes(tmp_path, 2, partial(offloaded, stage, False))) < ROUNDING["no"]


# It is compiled once, in a minute or two.
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_deepspeeds_own_adam_ends_in_the_weights_of_one_process(tmp_path: Path) -> None:
    found = outcomes(tmp_path, 2, partial(offloaded, 2, True), adamw=True, limit=480)
    assert difference(found, adamw=True) < ADAMW_ROUNDING


def on_a_disk(folder: str, precision: str, parts: list[str]) -> tuple[list[float], list[str]]:
    # each weight is on the disk but while it computes
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    for part in parts:
        zero[f"offload_{part}"] = {"device": "nvme", "nvme_path": folder, "buffer_count": 8}
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 4, "zero_force_ds_cpu_optimizer": False}
    plugin = DeepSpeedPlugin(hf_ds_config={**config, "gradient_clipping": 0.0})
    accelerator = Accelerator(cpu=True, mixed_precision=precision, deepspeed_plugin=plugin)
    torch.manual_seed(0)
    # large enough to be put on a disk
    model: Any = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
    losses = []
    for _ in range(4):
        loss = (model(torch.ones(4, 1024)) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    files = sorted({path.parent.parent.name for path in Path(folder).rglob("*.swp") if path.stat().st_size})
    accelerator.end_training()
    return losses, files


# It is compiled once, in a few minutes.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("precision", "parts"),
    [("no", ["optimizer"]), ("bf16", ["optimizer", "param"])],
    ids=["states of the optimizer", "weights, too"],
)
def test_what_is_on_a_disk_has_the_losses_of_what_is_not(precision: str, parts: list[str], tmp_path: Path) -> None:
    if complaint := async_io.missing_library():
        pytest.skip(complaint)
    expected, _ = run_on_ranks(on_a_disk, 2, str(tmp_path), precision, [], limit=LIMIT)[0]
    assert expected[-1] < 0.9 * expected[0]
    folders = {"optimizer": "optimizer", "param": "bfloat16params"}
    for losses, files in run_on_ranks(on_a_disk, 2, str(tmp_path), precision, parts, limit=780):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert files == sorted(folders[part] for part in parts)


def refuses_32_bits(folder: str) -> None:
    with pytest.raises(ConfigurationError, match="DeepSpeed writes them in bf16 all the same"):
        on_a_disk(folder, "no", ["param"])


def test_weights_in_32_bits_on_a_disk_are_refused_where_they_would_be_rounded(tmp_path: Path) -> None:
    if complaint := async_io.missing_library():
        pytest.skip(complaint)
    run_on_ranks(refuses_32_bits, 1, str(tmp_path), limit=LIMIT)


def test_a_build_that_was_killed_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    mark = tmp_path / "anything" / "lock"
    found = []
    monkeypatch.setattr(OpBuilder, "jit_load", lambda *_: found.append(mark.exists()))
    preparation._prepare_builds()
    mark.parent.mkdir()
    mark.touch()
    builder: Any = SimpleNamespace(name="anything")
    OpBuilder.jit_load(builder)
    with mark.open("w"):
        # another process builds
        OpBuilder.jit_load(builder)
    assert found == [False, True]


class Experts(nn.Module):
    """A layer of which each batch takes one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.experts[int(inputs[0, 0] > 0)](inputs)


def of_experts() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False, transformer_moe_cls_names="Experts")
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Experts(), nn.Linear(4, 1))
    data = TensorDataset(torch.randn(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 2))
    for (inputs,) in loader:
        # ranks take different experts
        inputs[0, 0] = 1.0 if accelerator.is_main_process else -1.0
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
    assert model.module[1]._z3_leaf is True
    with pytest.raises(ConfigurationError, match="layer class Nothing was requested"):
        DeepSpeedPlugin(transformer_moe_cls_names="Nothing").set_moe_leaf_modules(model.module)
    accelerator.end_training()


def test_experts_are_gathered_whole() -> None:
    run_on_ranks(of_experts, 2, limit=LIMIT)
