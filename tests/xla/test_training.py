"""A training on an XLA device: what it computes, and how often something is compiled for it."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate_nb import Accelerator
from accelerate_nb.big_models.memory import get_max_memory
from accelerate_nb.big_models.tensors import as_device, best_device
from accelerate_nb.runtime.xla import device as xla
from tests.runtime.loops import flat
from tests.xla.weights import fixed


def model_and_data() -> tuple[torch.nn.Module, Any]:
    model = fixed(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)))
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 8, generator=draw), torch.randn(64, 2, generator=draw))
    return model, data


def trained(
    optimizer: str, precision: str, steps: int, *, clips: bool, cpu: bool, package: str = "accelerate_nb"
) -> tuple[list[int], list[list[float]]]:
    """How many programs were compiled before each batch and after the last, and the weights."""
    # Accelerate's loader is read ahead by a thread, which notes the loader's end at any moment; windows are whole here
    window = import_module(f"{package}.utils").GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=False)
    options = {"mixed_precision": precision, "gradient_accumulation_plugin": window, "cpu": cpu}
    accelerator = import_module(package).Accelerator(**options)
    assert accelerator.device.type == ("cpu" if cpu else "xla")
    model, data = model_and_data()
    prepared_optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), 0.01)
        if optimizer == "adamw"
        else torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(prepared_optimizer, lambda step: min(1.0, step / 3))
    loader = DataLoader(data, batch_size=4)
    model, prepared_optimizer, loader, schedule = accelerator.prepare(model, prepared_optimizer, loader, schedule)
    count = (lambda: 0) if cpu else xla.compilations
    counts = []
    before = count()
    for _ in range(2):
        for inputs, targets in loader:
            counts.append(count() - before)
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                prepared_optimizer.step()
                schedule.step()
                prepared_optimizer.zero_grad()
            accelerator.log({"loss": loss})
            if len(counts) % 5 == 0:
                accelerator.print(len(counts), loss)
        counts.append(count() - before)
    weights = flat(accelerator.unwrap_model(model))
    accelerator.end_training()
    return counts, weights


WAYS = [
    ("adamw", "no", 1, True),
    ("adamw", "no", 4, True),
    ("sgd", "no", 1, False),
    ("sgd", "no", 4, True),
    ("adamw", "bf16", 1, True),
    ("sgd", "bf16", 4, False),
]


def ways_of(package: str, cpu: bool, *numbers: int) -> list[Any]:
    found = []
    for name, precision, steps, clips in [WAYS[number] for number in numbers]:
        found.append(trained(name, precision, steps, clips=clips, cpu=cpu, package=package))
        if package == "accelerate":
            import_module("accelerate.state").AcceleratorState._reset_state(True)
    return found


@pytest.fixture(scope="module")
def ours(launched_on_xla) -> list[Any]:
    return launched_on_xla(ways_of, "accelerate_nb", False, *range(len(WAYS)))[0]


def assert_alike(way: tuple[Any, ...], found: Any, expected: Any) -> None:
    tolerance = 2e-2 if "bf16" in way else 2e-5
    for weight, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(weight), torch.tensor(other), rtol=tolerance, atol=tolerance)


def test_the_weights_are_those_of_the_cpu_and_nothing_is_compiled_after_the_second_step(ours):
    of_cpu = ways_of("accelerate_nb", True, *range(len(WAYS)))
    for way, (counts, found), (_, expected) in zip(WAYS, ours, of_cpu, strict=True):
        assert counts[-1] == counts[2 * way[2]], (way, counts)
        assert_alike(way, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 4])
def test_the_weights_are_those_of_accelerate(ours, launched_on_xla, number):
    pytest.importorskip("accelerate")
    ((_, expected),) = launched_on_xla(ways_of, "accelerate", False, number)[0]
    assert_alike(WAYS[number], ours[number][1], expected)


def peculiarities() -> dict[str, Any]:
    accelerator = Accelerator()
    found: dict[str, Any] = {
        "best device": best_device() == as_device(0) == accelerator.device,
        "memory": [list(get_max_memory()), get_max_memory({0: "1KB"})],
    }

    tied = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    weight = tied[0].weight
    optimizer = torch.optim.SGD(tied.parameters(), 0.1)
    prepared = accelerator.prepare_model(tied)
    found["tied"] = prepared[0].weight is prepared[1].weight is weight is optimizer.param_groups[0]["params"][0]
    found["device"] = weight.device.type
    optimizer = accelerator.prepare_optimizer(optimizer)

    start = weight.detach().cpu().clone()
    counts = []
    for _ in range(4):
        accelerator.backward(prepared(torch.ones(2, 4, device=accelerator.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
        xla.wait()
        counts.append(xla.compilations())
    found["without a loader"] = counts
    found["learned"] = not torch.equal(start, weight.detach().cpu())

    loader = accelerator.prepare(DataLoader(torch.ones(8, 4), batch_size=4))
    counts = []
    for batch in loader:
        for _ in range(4):
            accelerator.backward(prepared(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            counts.append(xla.compilations())
    found["several steps with a batch"] = counts

    uneven = _TwoHeads()
    uneven, uneven_optimizer = accelerator.prepare(uneven, torch.optim.AdamW(uneven.parameters(), weight_decay=0.5))
    before = uneven.unused.weight.detach().cpu().clone()
    accelerator.backward(uneven(torch.ones(2, 4, device=accelerator.device)).sum())
    norm = accelerator.clip_grad_norm_(uneven.parameters(), 0.1)
    uneven_optimizer.step()
    found["norm"] = norm.device.type
    found["unused stays"] = torch.equal(before, uneven.unused.weight.detach().cpu())
    accelerator.end_training()
    found["compiled"] = [compiled(backend) for backend in ("no", "openxla")]
    return found


def compiled(backend: str) -> tuple[list[float], bool]:
    """What a model learns whose forward `torch.compile` takes first, and whether its later steps compile nothing."""
    accelerator = Accelerator(dynamo_backend=backend)
    model, _ = model_and_data()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    counts = []
    for _ in range(4):
        accelerator.backward(model(torch.ones(2, 8, device=accelerator.device)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        counts.append(xla.compilations())
    weights = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()]).tolist()
    accelerator.end_training()
    return weights, counts[1] == counts[-1]


class _TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(4, 4)
        self.unused = torch.nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


@pytest.fixture(scope="module")
def found(launched_on_xla) -> dict[str, Any]:
    return launched_on_xla(peculiarities)[0]


def test_large_models_find_the_device_once_it_is_awake(found):
    assert found["best device"]
    # a device of torch_xla's CPU backend has the host's memory
    assert found["memory"] == [["cpu"], {0: 1000}]


def test_weights_stay_the_same_objects_and_an_optimizer_made_before_trains_those_with_gradients(found):
    names = ("tied", "device", "learned", "norm", "unused stays")
    assert [found[name] for name in names] == [True, "xla", True, "xla", True]


def test_neither_a_loop_without_a_loader_nor_several_steps_with_a_batch_compile_ever_more(found):
    assert found["without a loader"][1] == found["without a loader"][-1]
    counts = found["several steps with a batch"]
    assert counts[-1] == counts[-4], counts


def test_torch_s_own_compiler_for_xla_gives_the_same_weights_and_compiles_no_more(found):
    (plain, _), (weights, is_settled) = found["compiled"]
    torch.testing.assert_close(torch.tensor(weights), torch.tensor(plain), rtol=1e-5, atol=1e-6)
    assert is_settled
