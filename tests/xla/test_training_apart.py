"""Trainings on two XLA devices whose ranks do not all do the same."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator, DistributedDataParallelKwargs
from accelerate_nb.errors import ConfigurationError
from tests.ranks import run_on_ranks
from tests.runtime.loops import flat
from tests.xla.weights import fixed

SAMPLES = 22


def gan(cpu: bool) -> list[list[float]]:
    """Two models with an optimizer each; the one's loss goes through the other, in blocks of accumulation of their own."""
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=2)
    maker, judge = fixed(nn.Linear(3, 4)), fixed(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    makes, judges = torch.optim.Adam(maker.parameters(), 0.05), torch.optim.SGD(judge.parameters(), 0.1)
    data = torch.randn(32, 7, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(data, batch_size=4)
    maker, judge, makes, judges, loader = accelerator.prepare(maker, judge, makes, judges, loader)
    cross_entropy = nn.functional.binary_cross_entropy_with_logits
    for batch in loader:
        real, noise = batch[:, :4], batch[:, 4:]
        made = maker(noise)
        with accelerator.accumulate(judge):
            seen, made_up = judge(real), judge(made.detach())
            accelerator.backward(
                cross_entropy(seen, torch.ones_like(seen)) + cross_entropy(made_up, torch.zeros_like(made_up))
            )
            judges.step()
            judges.zero_grad()
        with accelerator.accumulate(maker):
            fooled = judge(made)
            accelerator.backward(cross_entropy(fooled, torch.ones_like(fooled)))
            makes.step()
            makes.zero_grad()
    weights = [*flat(maker), *flat(judge)]
    accelerator.end_training()
    return weights


class Branches(nn.Module):
    """Each rank uses a head of its own, and all use the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.common(inputs))


def branches(cpu: bool) -> tuple[list[list[float]], bool]:
    accelerator = Accelerator(cpu=cpu, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    model = fixed(Branches())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    inputs = torch.ones(2, 4, device=accelerator.device)
    for step in range(4):
        head = accelerator.process_index if step < 2 else 1 - accelerator.process_index
        accelerator.backward(model(inputs, head).mean())
        optimizer.step()
        optimizer.zero_grad()
    inner = accelerator.unwrap_model(model)
    weights = flat(inner)
    never = inner.heads[2].weight.grad is None
    accelerator.end_training()
    return weights, never


def normalised(cpu: bool) -> list[list[float]]:
    """Weights and running means; each rank's batches have another mean."""
    accelerator = Accelerator(cpu=cpu)
    draw = torch.Generator().manual_seed(1)
    model = fixed(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(3):
        inputs = (torch.randn(6, 4, generator=draw) + accelerator.process_index).to(accelerator.device)
        accelerator.backward(model(inputs).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()  # DistributedDataParallel sends buffers when the model is called
    model(torch.ones(2, 4, device=accelerator.device))
    inner = accelerator.unwrap_model(model)
    found = [item.detach().cpu().flatten().tolist() for item in (*inner.parameters(), *inner.buffers())]
    accelerator.end_training()
    return found


def accumulated(cpu: bool) -> dict[str, Any]:
    """A loader that divides neither by the ranks nor by the accumulation, and whose batches workers read."""
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=2)
    model = fixed(nn.Linear(1, 1))
    data = torch.arange(float(SAMPLES)).reshape(-1, 1) / SAMPLES
    loader = DataLoader(data, batch_size=4, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    seen, steps = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).pow(2).mean())
            steps.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
        seen += accelerator.gather_for_metrics(batch * SAMPLES).flatten().round().int().tolist()
    weights = flat(accelerator.unwrap_model(model))
    accelerator.end_training()
    return {"seen": seen, "steps": steps, "weights": weights}


def unprepared() -> list[float]:
    """What is said of an optimizer whose weights are in no prepared model."""
    accelerator = Accelerator()
    model = nn.Linear(2, 1).to(accelerator.device)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    before = model.weight.detach().cpu()
    inputs = torch.full((1, 2), float(accelerator.process_index), device=accelerator.device)
    for _ in range(2):
        accelerator.backward(model(inputs).sum())
        optimizer.step()
        optimizer.zero_grad()
    moved: list[float] = (before - model.weight.detach().cpu()).flatten().tolist()
    accelerator.end_training()
    return moved


def joined() -> str:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 1))
    try:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            return "joined"
    except ConfigurationError as error:
        return str(error)
    finally:
        accelerator.end_training()


def everything(cpu: bool) -> dict[str, Any]:
    found: dict[str, Any] = {train.__name__: train(cpu) for train in (gan, branches, normalised, accumulated)}
    return found if cpu else found | {"unprepared": unprepared(), "joined": joined()}


@pytest.fixture(scope="module")
def runs(launched_on_xla, tmp_path_factory) -> tuple[list[Any], list[Any], str]:
    """The trainings on two processes with an XLA device each, and on two without; what the former said."""
    known = set(tmp_path_factory.getbasetemp().rglob("rank_*.log"))
    found = launched_on_xla(everything, False, num_processes=2)
    logs = set(tmp_path_factory.getbasetemp().rglob("rank_*.log")) - known
    return found, run_on_ranks(everything, 2, True), "".join(path.read_text() for path in logs)


def alike(results: Any, references: Any) -> None:
    for mine, expected in zip(results, references, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(expected), rtol=2e-5, atol=2e-5)


def test_two_models_with_an_optimizer_each_learn_what_they_learn_on_two_processes(runs):
    found, expected, _ = runs
    assert found[0]["gan"] == found[1]["gan"]
    alike(found[0]["gan"], expected[0]["gan"])


def test_weights_that_only_some_ranks_use_are_averaged_and_those_of_none_stay(runs):
    found, expected, _ = runs
    assert found[0]["branches"] == found[1]["branches"]
    assert found[0]["branches"][1]
    alike(found[0]["branches"][0], expected[0]["branches"][0])


def test_running_means_are_the_first_rank_s_on_all(runs):
    found, expected, _ = runs
    assert found[0]["normalised"] == found[1]["normalised"]
    # but for the running variance, for which torch_xla does not correct a batch's variance by n / (n - 1), as torch does
    alike(*([*item[0]["normalised"][:7], item[0]["normalised"][8]] for item in (found, expected)))


def test_a_loader_that_divides_by_nothing_gives_each_sample_once(runs):
    found, expected, _ = runs
    for rank in range(2):
        assert found[rank]["accumulated"]["seen"] == list(range(SAMPLES))
        assert found[rank]["accumulated"]["steps"] == expected[rank]["accumulated"]["steps"] == [False, True, True]
        alike(found[rank]["accumulated"]["weights"], expected[rank]["accumulated"]["weights"])


def test_weights_of_no_prepared_model_are_averaged_and_reported_and_uneven_inputs_can_t_be_joined(runs):
    found, _, output = runs
    for rank in range(2):
        assert found[rank]["unprepared"] == pytest.approx([0.1, 0.1])
    assert output.count("The optimizer's weights are in no prepared model") == 2
    assert "Leave even_batches=True" in found[0]["joined"]
