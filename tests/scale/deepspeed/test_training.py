"""A training with DeepSpeed beyond its steps: weights, checkpoints, evaluation, precision, several engines, and what is refused."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError, NotYetError, StateError
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
from tests.runtime.loops import train_epoch
from tests.runtime.strategies.contract import ACCUMULATION, ADAMW_ROUNDING, MICRO_STEPS, difference, train
from tests.scale.deepspeed.zero import LIMIT, by_stage

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


def whole_and_parts(folder: str) -> dict[str, Any]:
    """Stage 3 by a configuration that names optimizer and schedule: what is in parts, and what is whole where."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=FILE, zero3_init_flag=False))
    plain = net()
    optimizer = DummyOptim(plain.parameters(), lr=0.01)
    schedule = DummyScheduler(optimizer, warmup_num_steps=4)
    model, optimizer, schedule, loader = accelerator.prepare(plain, optimizer, schedule, DataLoader(samples(), 4))
    rates, losses = [], []
    for _ in range(3):
        losses += train_epoch(accelerator, model, optimizer, schedule, loader)
        rates.append(schedule.get_last_lr()[0])
    inner = accelerator.unwrap_model(model)
    weights = accelerator.get_state_dict(model)
    assert inner is plain
    assert [weight.numel() for weight in inner.parameters()] == [0, 0, 0, 0]
    found: dict[str, Any] = {}
    with GatheredParameters(inner.parameters()):
        found["gathered"] = [weight.detach().clone() for weight in inner.parameters()]
    with GatheredParameters(inner[2].bias, modifier_rank=0):
        if accelerator.is_main_process:
            inner[2].bias.data.fill_(7.0)
    with GatheredParameters([inner[2].bias]):
        assert inner[2].bias.item() == 7.0
        inner[2].bias.data.copy_(found["gathered"][3])
    with GatheredParameters(inner[2].bias, modifier_rank=0):
        inner[2].bias.data.copy_(found["gathered"][3])
    accelerator.save_model(model, f"{folder}/model")
    accelerator.save_state(f"{folder}/state", client_state={"epoch": 3})
    model.eval()
    with torch.no_grad():
        evaluated = accelerator.prepare_data_loader(DataLoader(samples(22), 4))
        predictions = [accelerator.gather_for_metrics(model(inputs)) for inputs, _ in evaluated]
    found["predictions"] = torch.cat(predictions)
    types = [type(item).__name__ for item in (model, optimizer, schedule)]
    assert types == ["DeepSpeedEngine", "DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper"]
    assert isinstance(schedule, DeepSpeedSchedulerWrapper)
    assert (accelerator.distributed_type.value, accelerator.num_processes) == ("DEEPSPEED", 2)
    assert losses[-1] < losses[0]
    # the engine moves the schedule, once a step
    assert rates[0] < rates[-1] == pytest.approx(0.01)
    found["weights"] = {name: weight.clone() for name, weight in weights.items()}
    assert extract_model_from_parallel(model) is plain
    accelerator.end_training()
    return found


def test_weights_of_stage_3_are_whole_where_they_are_needed(tmp_path: Path) -> None:
    found, other = run_on_ranks(whole_and_parts, 2, str(tmp_path), limit=LIMIT)
    assert other["weights"] == {}
    torch.testing.assert_close(list(found["weights"].values()), found["gathered"], rtol=0, atol=0)
    torch.testing.assert_close(other["gathered"], found["gathered"], rtol=0, atol=0)
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
    # the arguments of save_state are the engine's
    written = torch.load(state / "pytorch_model" / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    assert written["epoch"] == 3
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


def in_bf16() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, DataLoader(samples(), 4))
    losses = [sum(train_epoch(accelerator, model, optimizer, schedule, loader)) for _ in range(8)]
    with torch.no_grad():
        output = model(torch.ones(1, 8))
    assert losses[-1] < losses[0] / 2
    assert (model.module[0].weight.dtype, output.dtype) == (torch.bfloat16, torch.float32)
    assert (accelerator.mixed_precision, accelerator.state.mixed_precision) == ("bf16", "bf16")
    accelerator.end_training()


def test_weights_are_in_bf16_and_outputs_in_32_bits() -> None:
    run_on_ranks(in_bf16, 2, limit=LIMIT)


def refuse(message: str, function: Callable[..., Any], *args: Any, **settings: Any) -> None:
    with pytest.raises((ConfigurationError, NotYetError, StateError), match=message):
        function(*args, **settings)


def refusals() -> None:
    model = net()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(), 4)
    accelerator = Accelerator(cpu=True, strategy="deepspeed", gradient_accumulation_steps=2)
    refuse("this call of prepare has no loader", accelerator.prepare, model, optimizer)
    refuse("without its model", accelerator.prepare, optimizer, loader)
    refuse("whose engine has one of each", accelerator.prepare, model, net(), optimizer, loader)
    refuse("names no optimizer", accelerator.prepare, model, DummyOptim(model.parameters()), loader)
    plugin_config = accelerator.deepspeed_plugin.deepspeed_config
    plugin_config["tensor_parallel"] = {"autotp_size": 2}
    refuse("autotp_size was requested", accelerator.prepare, model, optimizer, loader)
    del plugin_config["tensor_parallel"]
    prepared, stepping, _batches = accelerator.prepare(model, optimizer, loader)
    refuse("Use `clip_grad_norm_` instead", accelerator.clip_grad_value_, prepared.parameters(), 1.0)
    refuse("DeepSpeed measures norm 2", accelerator.clip_grad_norm_, prepared.parameters(), 1.0, norm_type=1)
    refuse("second Accelerator", Accelerator, cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
    with accelerator.accumulate(prepared):
        accelerator.backward(prepared(torch.ones(1, 8)).sum())
        stepping.step()
    refuse("inside of a window of accumulation", accelerator.save_state, "nowhere")
    accelerator.end_training()
    averaging = GradientAccumulationPlugin(2, average_over_window=True)
    accelerator = Accelerator(cpu=True, strategy="deepspeed", gradient_accumulation_plugin=averaging)
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    refuse("average_over_window=True", accelerator.prepare, net(), optimizer, loader)


def test_what_deepspeed_cannot_do_is_refused_by_name() -> None:
    run_on_ranks(refusals, 1, limit=LIMIT)


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


def two_engines() -> None:
    of_student, of_teacher = DeepSpeedPlugin(zero_stage=2), DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False)
    first = Accelerator(cpu=True, deepspeed_plugins={"student": of_student, "teacher": of_teacher})
    second = Accelerator()
    assert get_active_deepspeed_plugin(first.state) is of_student
    assert first.deepspeed_engine_wrapped is None
    assert str(first.state).endswith(f"ds_config: {of_student.deepspeed_config}\n")
    student, loader = net(), DataLoader(samples(), 4)
    student, optimizer, loader = first.prepare(student, torch.optim.SGD(student.parameters(), lr=0.1), loader)
    first.state.select_deepspeed_plugin("teacher")
    assert (of_student.selected, of_teacher.selected) == (False, True)
    assert second.deepspeed_plugin is of_teacher
    assert second.deepspeed_config is of_teacher.deepspeed_config
    # whose size of batches is that of the student's
    other = second.prepare(net(), loader)[0]
    assert other.train_micro_batch_size_per_gpu() == 4
    assert (first.deepspeed_engine_wrapped.engine, second.deepspeed_engine_wrapped.engine) == (student, other)
    assert (student.zero_optimization_stage(), other.zero_optimization_stage()) == (2, 3)
    for inputs, _ in loader:
        with torch.no_grad():
            wanted = other(inputs)
        first.backward(nn.functional.mse_loss(student(inputs), wanted + 1))
        optimizer.step()
    assert student.module[2].bias.item() > net()[2].bias.item()
    first.end_training()


def test_several_models_have_a_plugin_each_by_name() -> None:
    run_on_ranks(two_engines, 2, limit=LIMIT)


def with_a_teacher(folder: str) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False))
    student, loader = net(), DataLoader(samples(), 4)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    falling = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    schedule = DummyScheduler(optimizer, lr_scheduler_callable=falling)
    student, optimizer, schedule, loader = accelerator.prepare(student, optimizer, schedule, loader)
    teacher = accelerator.prepare(net())
    for inputs, _ in loader:
        with torch.no_grad():
            wanted = teacher(inputs) + 1
        accelerator.backward(nn.functional.mse_loss(student(inputs), wanted))
        optimizer.step()
    assert schedule.get_last_lr() == [pytest.approx(0.1 * 0.9 ** len(loader))]
    learned, known = accelerator.get_state_dict(student), accelerator.get_state_dict(teacher)
    if accelerator.is_local_main_process:
        assert learned["2.bias"].item() > net()[2].bias.item() + 0.1
        assert all(torch.equal(known[name], weight) for name, weight in net().state_dict().items())
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    second = net()
    refuse("whose engine has one of each", accelerator.prepare, second, torch.optim.SGD(second.parameters(), lr=0.1))
    accelerator.end_training()


def test_the_accelerator_that_trains_evaluates_a_teacher_in_parts_and_makes_a_schedule_by_a_callable(
    tmp_path: Path,
) -> None:
    run_on_ranks(with_a_teacher, 2, str(tmp_path), limit=LIMIT)


def clipped(max_norm: float | None, configured: float | None, expected: float) -> None:
    model = net()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_clipping=configured))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, _ = accelerator.prepare(model, optimizer, DataLoader(samples(), 4))
    before = accelerator.get_state_dict(model)
    accelerator.backward(10 * model(torch.ones(4, 8)).sum())
    norm = None if max_norm is None else accelerator.clip_grad_norm_(model.parameters(), max_norm).item()
    optimizer.step()
    after = model.module.state_dict()
    moved = torch.stack([(after[name] - before[name]).norm() for name in after]).norm().item()
    of_engine = float(model.get_global_grad_norm())
    assert moved == pytest.approx(expected, rel=1e-4)
    assert of_engine > 10
    assert norm is None or norm == pytest.approx(of_engine)
    accelerator.end_training()


@pytest.mark.parametrize(
    ("max_norm", "configured", "moved"),
    [(0.5, 0.0, 0.5), (0.5, 2.0, 0.5), (5.0, 2.0, 2.0), (None, None, 1.0), (None, 0.25, 0.25)],
)
def test_gradients_are_clipped_by_the_call_and_by_the_configuration(
    max_norm: float | None, configured: float | None, moved: float
) -> None:
    run_on_ranks(clipped, 1, max_norm, configured, moved, limit=LIMIT)
