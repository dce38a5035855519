"""The same training gives the same weights as hand-written torch_xla code and as Hugging Face Accelerate, on one XLA device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_nb import Accelerator
from tests.runtime.loops import flat

SAMPLES, BATCH = 48, 4
# module-scoped, and yet a dozen trainings that XLA compiles
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """A training: no dropout in it, since what is drawn after a sync is not drawn alike."""

    optimizer: str
    accumulation: int = 1
    clip: float = 0.0
    precision: str = "no"


CASES = {
    "sgd": Case("sgd"),
    "adamw, accumulated": Case("adamw", accumulation=2),
    "sgd, accumulated and clipped": Case("sgd", accumulation=2, clip=0.1),
    "adamw, bf16": Case("adamw", precision="bf16"),
}
Weights = list[list[float]]


def parts(case: Case, device: torch.device | None = None) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    # torch puts other weights in the place of those that go to an XLA device, so by hand the optimizer is made after that
    model.to(device)
    inputs, targets = torch.randn(SAMPLES, 8), torch.randint(0, 3, (SAMPLES,))
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
        if case.optimizer == "adamw"
        else torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
    return model, optimizer, DataLoader(TensorDataset(inputs, targets), batch_size=BATCH), schedule


def by_hand(case: Case) -> Weights:
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    device = torch_xla.device()
    model, optimizer, loader, schedule = parts(case, device)
    for number, (inputs, targets) in enumerate(MpDeviceLoader(loader, device), start=1):
        with torch.autocast("xla", dtype=torch.bfloat16, enabled=case.precision == "bf16"):
            outputs = model(inputs)
        (nn.functional.cross_entropy(outputs.float(), targets) / case.accumulation).backward()
        if number % case.accumulation == 0:
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            xm.optimizer_step(optimizer)
            schedule.step()
            optimizer.zero_grad()
    return flat(model)


def by_accelerate(case: Case) -> Weights:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import GradientAccumulationPlugin

    # Its loader is read ahead by a thread, which notes the loader's end at any moment, and a window ends there. Windows are whole here.
    plugin = GradientAccumulationPlugin(num_steps=case.accumulation, sync_with_dataloader=False)
    try:
        return by_accelerator(Accelerator, case, gradient_accumulation_plugin=plugin)
    finally:
        AcceleratorState._reset_state(True)


def by_us(case: Case) -> Weights:
    return by_accelerator(Accelerator, case, gradient_accumulation_steps=case.accumulation)


def by_accelerator(accelerator_class: Callable[..., Any], case: Case, **accumulation: Any) -> Weights:
    accelerator = accelerator_class(mixed_precision=case.precision, **accumulation)
    assert accelerator.device.type == "xla"
    model, optimizer, loader, schedule = accelerator.prepare(*parts(case))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs).float(), targets)
            accelerator.backward(loss)
            if case.clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    weights = flat(accelerator.unwrap_model(model))
    accelerator.end_training()
    return weights


WAYS = {"ours": by_us, "by hand": by_hand, "Accelerate": by_accelerate}


def all_ways() -> dict[str, dict[str, Weights]]:
    return {name: {way: train(case) for way, train in WAYS.items()} for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found(launched_on_xla) -> dict[str, dict[str, Weights]]:
    pytest.importorskip("accelerate")
    return launched_on_xla(all_ways)[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("other", ["by hand", "Accelerate"])
def test_the_weights_are_the_same(found, name, other):
    tolerance = 2e-2 if CASES[name].precision == "bf16" else 1e-6
    for weight, expected in zip(found[name]["ours"], found[name][other], strict=True):
        torch.testing.assert_close(torch.tensor(weight), torch.tensor(expected), rtol=tolerance, atol=tolerance)


def test_each_training_of_these_is_one_of_its_own(found):
    assert len({str(ways["ours"]) for ways in found.values()}) == len(CASES)
