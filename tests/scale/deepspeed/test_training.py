"""A training with DeepSpeed beyond its steps: weights, checkpoints, evaluation, precision, several engines, and what is refused."""

import os
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError, StateError
from accelerate_nb.utils import (
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    GatheredParameters,
    GradientAccumulationPlugin,
    extract_model_from_parallel,
)
from accelerate_nb.utils.deepspeed import DeepSpeedSchedulerWrapper, get_active_deepspeed_plugin
from tests.ranks import run_on_ranks
from tests.runtime.strategies.contract import ACCUMULATION, ADAMW_ROUNDING, MICRO_STEPS, difference, train
from tests.scale.deepspeed.zero import by_stage

LIMIT = 110.0
FILE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "Adam", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(("warmup_max_lr", "warmup_num_steps"), "auto")},
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def samples(count: int = 24) -> TensorDataset:
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def steps(accelerator: Accelerator, model: Any, optimizer: Any, schedule: Any, loader: Any) -> list[float]:
    losses = []
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_and_parts(folder: str) -> dict[str, Any]:
    """Stage 3 by a configuration that names optimizer and schedule: what is in parts, and what is whole where."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=FILE, zero3_init_flag=False))
    plain = net()
    optimizer = DummyOptim(plain.parameters(), lr=0.01)
    schedule = DummyScheduler(optimizer, warmup_num_steps=4)
    model, optimizer, schedule, loader = accelerator.prepare(plain, optimizer, schedule, DataLoader(samples(), 4))
    rates, losses = [], []
    for _ in range(3):
        losses += steps(accelerator, model, optimizer, schedule, loader)
        rates.append(schedule.get_last_lr()[0])
    inner = accelerator.unwrap_model(model)
    weights = accelerator.get_state_dict(model)
    found = {"numels": [weight.numel() for weight in inner.parameters()], "is_plain": inner is plain}
    with GatheredParameters(inner.parameters()):
        found["gathered"] = [weight.detach().clone() for weight in inner.parameters()]
    with GatheredParameters(inner[2].bias, modifier_rank=0):
        if accelerator.is_main_process:
            inner[2].bias.data.fill_(7.0)
    with GatheredParameters([inner[2].bias]):
        found["changed"] = inner[2].bias.item()
        inner[2].bias.data.copy_(found["gathered"][3])
    with GatheredParameters(inner[2].bias, modifier_rank=0):
        inner[2].bias.data.copy_(found["gathered"][3])
    accelerator.save_model(model, f"{folder}/model")
    accelerator.save_state(f"{folder}/state")
    model.eval()
    with torch.no_grad():
        evaluated = accelerator.prepare_data_loader(DataLoader(samples(22), 4))
        predictions = [accelerator.gather_for_metrics(model(inputs)) for inputs, _ in evaluated]
    found["predictions"] = torch.cat(predictions)
    found["types"] = [type(item).__name__ for item in (model, optimizer, schedule)]
    found["facts"] = [
        accelerator.distributed_type.value,
        accelerator.num_processes,
        isinstance(schedule, DeepSpeedSchedulerWrapper),
    ]
    found["rates"], found["losses"] = rates, losses
    found["weights"] = {name: weight.clone() for name, weight in weights.items()}
    found["extracted"] = extract_model_from_parallel(model) is plain
    accelerator.end_training()
    return found


def test_weights_of_stage_3_are_whole_where_they_are_needed(tmp_path: Path) -> None:
    found, other = run_on_ranks(whole_and_parts, 2, str(tmp_path), limit=LIMIT)
    assert found["numels"] == [0, 0, 0, 0]
    assert found["is_plain"]
    assert found["extracted"]
    assert found["types"] == ["DeepSpeedEngine", "DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper"]
    assert found["facts"] == ["DEEPSPEED", 2, True]
    assert found["losses"][-1] < found["losses"][0]
    # the engine moves the schedule, once a step
    assert found["rates"][0] < found["rates"][-1] == pytest.approx(0.01)
    assert other["weights"] == {}
    torch.testing.assert_close(list(found["weights"].values()), found["gathered"], rtol=0, atol=0)
    torch.testing.assert_close(other["gathered"], found["gathered"], rtol=0, atol=0)
    assert (found["changed"], other["changed"]) == (7.0, 7.0)
    plain = net()
    plain.load_state_dict(found["weights"])
    expected = plain(samples(22).tensors[0]).detach()
    torch.testing.assert_close(found["predictions"], expected)
    torch.testing.assert_close(other["predictions"], expected)
    # what anybody reads without DeepSpeed, and with its script
    torch.testing.assert_close(load_file(tmp_path / "model" / "model.safetensors"), found["weights"], rtol=0, atol=0)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = tmp_path / "state"
    assert {"pytorch_model", "latest", "zero_to_fp32.py", "random_states_0.pkl"} <= {
        path.name for path in state.iterdir()
    }
    assert not (state / "scheduler.bin").exists()
    converted = get_fp32_state_dict_from_zero_checkpoint(str(state))
    torch.testing.assert_close(
        {name: converted[name] for name in found["weights"]}, found["weights"], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_checkpoint_is_loaded_by_another_number_of_ranks(
    stage: int, saved_by: int, loaded_by: int, tmp_path: Path
) -> None:
    folder, whole_windows, arguments = str(tmp_path / "checkpoint"), 2 * ACCUMULATION, partial(by_stage, stage)
    # DeepSpeed converts what Adam remembers
    run_on_ranks(train, saved_by, folder, arguments, whole_windows, False, "no", True, limit=LIMIT)
    rest = MICRO_STEPS - whole_windows
    found = run_on_ranks(train, loaded_by, folder, arguments, rest, True, "no", True, limit=LIMIT)
    assert difference(found, adamw=True) < ADAMW_ROUNDING
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def in_bf16() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, DataLoader(samples(), 4))
    losses = [sum(steps(accelerator, model, optimizer, schedule, loader)) for _ in range(8)]
    with torch.no_grad():
        output = model(torch.ones(1, 8))
    found = {"losses": losses, "dtypes": [str(model.module[0].weight.dtype), str(output.dtype)]}
    found["names"] = [accelerator.mixed_precision, accelerator.state.mixed_precision]
    accelerator.end_training()
    return found


def test_weights_are_in_bf16_and_outputs_in_32_bits() -> None:
    for found in run_on_ranks(in_bf16, 2, limit=LIMIT):
        assert found["losses"][-1] < found["losses"][0] / 2
        assert found["dtypes"] == ["torch.bfloat16", "torch.float32"]
        assert found["names"] == ["bf16", "bf16"]


def refusals() -> dict[str, str]:
    found: dict[str, str] = {}

    def note(name: str, function: Callable[[], Any]) -> None:
        try:
            function()
        except (ConfigurationError, StateError) as error:
            found[name] = str(error)

    model = net()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(), 4)
    accelerator = Accelerator(cpu=True, strategy="deepspeed", gradient_accumulation_steps=2)
    note("no loader", lambda: accelerator.prepare(model, optimizer))
    note("alone", lambda: accelerator.prepare(optimizer, loader))
    note("two models", lambda: accelerator.prepare(model, net(), optimizer, loader))
    note("dummy", lambda: accelerator.prepare(model, DummyOptim(model.parameters()), loader))
    prepared, stepping, _batches = accelerator.prepare(model, optimizer, loader)
    note("clip value", lambda: accelerator.clip_grad_value_(prepared.parameters(), 1.0))
    note("norm", lambda: accelerator.clip_grad_norm_(prepared.parameters(), 1.0, norm_type=1))
    note("second", lambda: Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1)))
    with accelerator.accumulate(prepared):
        accelerator.backward(prepared(torch.ones(1, 8)).sum())
        stepping.step()
    note("in a window", lambda: accelerator.save_state("nowhere"))
    accelerator.end_training()
    averaging = GradientAccumulationPlugin(2, average_over_window=True)
    accelerator = Accelerator(cpu=True, strategy="deepspeed", gradient_accumulation_plugin=averaging)
    note("average", lambda: accelerator.prepare(net(), torch.optim.SGD(net().parameters(), lr=0.1), loader))
    return found


REFUSED = {
    "no loader": "this call of prepare has no loader",
    "alone": "without its model",
    "two models": "whose engine has one of each",
    "dummy": "names no optimizer",
    "clip value": "Use `clip_grad_norm_` instead",
    "norm": "DeepSpeed measures norm 2",
    "second": "second Accelerator",
    "in a window": "inside of a window of accumulation",
    "average": "average_over_window=True",
}


def test_what_deepspeed_cannot_do_is_refused_by_name() -> None:
    (found,) = run_on_ranks(refusals, 1, limit=LIMIT)
    assert found.keys() == REFUSED.keys()
    assert all(REFUSED[name] in text for name, text in found.items())


def in_fp16() -> str:
    from deepspeed.accelerator import get_accelerator

    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        Accelerator(cpu=True, mixed_precision="fp16", strategy="deepspeed")
    except ConfigurationError as error:
        return str(error)
    assert get_accelerator().is_fp16_supported()
    return "does not compute in it: no, it does"


def test_fp16_is_refused_where_the_device_does_not_compute_in_it() -> None:
    assert "does not compute in it" in run_on_ranks(in_fp16, 1, limit=LIMIT)[0]


def two_engines() -> dict[str, Any]:
    plugins = {
        "student": DeepSpeedPlugin(zero_stage=2),
        "teacher": DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False),
    }
    first = Accelerator(cpu=True, deepspeed_plugins=plugins)
    second = Accelerator()
    found: dict[str, Any] = {"first": get_active_deepspeed_plugin(first.state) is plugins["student"]}
    student, loader = net(), DataLoader(samples(), 4)
    student, optimizer, loader = first.prepare(student, torch.optim.SGD(student.parameters(), lr=0.1), loader)
    first.state.select_deepspeed_plugin("teacher")
    found["selected"] = [plugin.selected for plugin in plugins.values()]
    found["active"] = second.deepspeed_plugin is plugins["teacher"]
    teacher = net()
    # whose size of batches is that of the student's
    other = second.prepare(teacher, loader)[0]
    found["samples"] = other.train_micro_batch_size_per_gpu()
    found["stages"] = [engine.zero_optimization_stage() for engine in (student, other)]
    for inputs, _ in loader:
        with torch.no_grad():
            wanted = other(inputs)
        first.backward(nn.functional.mse_loss(student(inputs), wanted + 1))
        optimizer.step()
    found["bias"] = student.module[2].bias.item()
    first.end_training()
    return found


def test_several_models_have_a_plugin_each_by_name() -> None:
    for found in run_on_ranks(two_engines, 2, limit=LIMIT):
        assert found["first"]
        assert found["active"]
        assert found["selected"] == [False, True]
        assert found["stages"] == [2, 3]
        assert found["samples"] == 4
        assert found["bias"] > net()[2].bias.item()


def clipped(max_norm: float | None, configured: float | None) -> dict[str, Any]:
    model = net()
    before = deepcopy(model.state_dict())
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_clipping=configured))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, _ = accelerator.prepare(model, optimizer, DataLoader(samples(), 4))
    accelerator.backward(10 * model(torch.ones(4, 8)).sum())
    norm = None if max_norm is None else accelerator.clip_grad_norm_(model.parameters(), max_norm).item()
    optimizer.step()
    after = model.module.state_dict()
    moved = torch.stack([(after[name] - before[name]).norm() for name in after]).norm().item()
    engine_norm = float(model.get_global_grad_norm())
    accelerator.end_training()
    return {"norm": norm, "moved": moved, "engine": engine_norm}


@pytest.mark.parametrize(
    ("max_norm", "configured", "moved"),
    [(0.5, 0.0, 0.5), (0.5, 2.0, 0.5), (5.0, 2.0, 2.0), (None, None, 1.0), (None, 0.25, 0.25)],
)
def test_gradients_are_clipped_by_the_call_and_by_the_configuration(
    max_norm: float | None, configured: float | None, moved: float
) -> None:
    (found,) = run_on_ranks(clipped, 1, max_norm, configured, limit=LIMIT)
    assert found["moved"] == pytest.approx(moved, rel=1e-4)
    assert found["engine"] > 10
    assert found["norm"] is None or found["norm"] == pytest.approx(found["engine"])
