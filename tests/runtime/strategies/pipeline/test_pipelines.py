"""A model whose layers are on several processes trains as on one."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_nb import Accelerator, ConfigurationError, ParallelismConfig
from accelerate_nb.errors import DataError, StateError
from accelerate_nb.runtime.strategies.pipeline.strategy import NAMES, SharedGradients
from accelerate_nb.runtime.world.world import World
from accelerate_nb.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin, TorchPipelineParallelConfig
from tests.ranks import run_on_ranks
from tests.runtime.strategies import pipeline_without_reductions
from tests.runtime.strategies.contract import Refused, check_refused
from tests.runtime.strategies.tiny_llama import by_hand, check_numbers, llama, trained

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


def staged(pp_size: int = 2, dp_shard_size: int = 1, **settings: Any) -> dict[str, Any]:
    handler = TorchPipelineParallelConfig(**settings)
    config = ParallelismConfig(pp_size=pp_size, dp_shard_size=dp_shard_size, pp_handler=handler)
    return {"parallelism_config": config}


def recomputing() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable()
    return model


tied_llama = partial(llama, tied=True)
COMPILED = {"dynamo_plugin": TorchDynamoPlugin(backend="eager")}
slow = pytest.mark.slow


@needs_transformers
@pytest.mark.parametrize(
    ("ranks", "make", "arguments"),
    [
        pytest.param(2, tied_llama, staged(), id="tied"),
        pytest.param(2, recomputing, staged(), id="recomputing", marks=slow),
        pytest.param(2, llama, staged() | COMPILED, id="compiled", marks=slow),
        pytest.param(4, tied_llama, staged(dp_shard_size=2), id="shards of tied", marks=slow),
        pytest.param(
            2, llama, staged(schedule="Interleaved1F1B", num_microbatches=4), id="two stages a process", marks=slow
        ),
    ],
)
def test_a_model_of_transformers_has_the_numbers_of_one_process(
    ranks: int, make: Callable[[], nn.Module], arguments: dict[str, Any]
) -> None:
    found = run_on_ranks(trained, ranks, make, arguments)
    check_numbers(found, make)
    # stages are the outermost axis of the mesh
    assert [item["coordinates"]["pp"] for item in found] == [rank * 2 // ranks for rank in range(ranks)]
    first, last = found[0]["parts"], found[-1]["parts"]
    if make in (tied_llama, recomputing) and ranks == 2:
        assert "model.layers.0.self_attn.q_proj.weight" in set(first) - set(last)
        assert "model.norm.weight" in set(last) - set(first)


@needs_transformers
@slow
def test_without_the_sum_of_shared_gradients_it_ends_in_other_weights() -> None:
    without_sum = staged() | {"strategy": pipeline_without_reductions.WithoutSumOfShared}
    found = run_on_ranks(trained, 2, tied_llama, without_sum)
    name = "model.embed_tokens.weight"
    assert (found[0]["state"][name] - by_hand(tied_llama)["state"][name]).abs().max() > 1e-4


def test_a_step_that_fails_keeps_the_gradients_of_those_before() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = earlier = torch.ones(1, 1)
    shared = SharedGradients(model, ["weight"], {}, (), World(0, 1, 0, 1, torch.device("cpu"), None))
    with pytest.raises(KeyboardInterrupt), shared.added():
        raise KeyboardInterrupt
    assert model.weight.grad is earlier


def eight_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(6, 6), nn.Tanh())])


def random_batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator) for _ in range(4)]


def steps_by(schedule: str, processes: int, count: int) -> list[list[float]]:
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, **staged(processes, schedule=schedule, num_microbatches=count)
    )
    model = eight_layers()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for batch in random_batches():
        with accelerator.accumulate(model):
            accelerator.train_step(model, batch, loss_fn=nn.functional.mse_loss, targets=batch.roll(1, 1))
            optimizer.step()
            optimizer.zero_grad()
    return [weight.flatten().tolist() for weight in accelerator.get_state_dict(model).values()]


def steps_by_hand() -> list[list[float]]:
    model = eight_layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for number, batch in enumerate(random_batches()):
        (nn.functional.mse_loss(model(batch), batch.roll(1, 1)) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [weight.flatten().tolist() for weight in model.state_dict().values()]


@pytest.mark.parametrize(
    ("schedule", "processes", "count"),
    [
        ("1F1B", 2, 4),
        *(pytest.param(name, 2, 4, marks=pytest.mark.slow) for name in NAMES),
        pytest.param("Interleaved1F1B", 4, 4, marks=pytest.mark.slow),
        pytest.param("DualPipeV", 4, 8, marks=pytest.mark.slow),
    ],
)
def test_each_schedule_ends_in_the_weights_of_one_process(schedule: str, processes: int, count: int) -> None:
    if schedule == "ZBVZeroBubble" and torch.__version__ < "2.10":
        pytest.skip("torch 2.9 can't pass a tensor between two stages of one process in this schedule")
    found = run_on_ranks(steps_by, processes, schedule, processes, count)[0]
    for weight, other in zip(found, steps_by_hand(), strict=True):
        assert weight == pytest.approx(other, abs=1e-6)


class Skip(nn.Module):
    """Layers of which the last one takes what the first one computes, or which are called in another order."""

    def __init__(self, *, reversed_calls: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.reversed_calls = reversed_calls

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.reversed_calls:
            return self.first(self.second(self.third(batch)))
        found = self.first(batch)
        return self.third(self.second(found) + found)


class Peek(nn.Module):
    """A model that looks at a number that its first layer computes, or writes them all to a tensor of its own."""

    def __init__(self, *, writes: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.writes = writes

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found = self.first(batch)
        if self.writes:
            return self.second(torch.zeros_like(batch).copy_(found))
        return self.second(found) if found.sum().item() > 0 else found


def forward_of(model: nn.Module, *split_points: str) -> None:
    accelerator = Accelerator(cpu=True, **staged(split_points=split_points or "auto"))
    with torch.no_grad():
        accelerator.prepare(model)(torch.ones(4, 4))


def plain_loop() -> None:
    accelerator = Accelerator(cpu=True, **staged())
    model = accelerator.prepare(eight_layers())
    accelerator.backward(model(torch.ones(4, 6)).sum())


def one_step(samples: int, **settings: Any) -> None:
    accelerator = Accelerator(cpu=True, **staged(**settings))
    model, batch = accelerator.prepare(eight_layers()), torch.ones(samples, 6)
    accelerator.train_step(model, batch, loss_fn=nn.functional.mse_loss, targets=batch)


def plugin_alone() -> None:
    Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), **staged())


def unknown_schedule() -> None:
    Accelerator(cpu=True, **staged(schedule="1f2b")).prepare(eight_layers())


REFUSED: Refused = {
    "skip": (
        partial(forward_of, Skip(reversed_calls=False), "third"),
        ConfigurationError,
        "third is on stage 1 of the pipeline, and takes what first on stage 0 computes",
    ),
    "order": (
        partial(forward_of, Skip(reversed_calls=True)),
        ConfigurationError,
        "calls it before .* Layers are put on stages in the order in which the model registers",
    ),
    "number": (partial(forward_of, Peek()), StateError, "A number of a tensor was requested"),
    "written": (partial(forward_of, Peek(writes=True)), StateError, "would write to a tensor what another stage"),
    "loop": (plain_loop, StateError, "called in a training loop.*accelerator.train_step"),
    "uneven": (
        partial(one_step, 3),
        DataError,
        "A batch of 3 samples was passed to a pipeline that cuts it in 2 equal parts",
    ),
    "parts": (
        partial(one_step, 4, schedule="DualPipeV", num_microbatches=2),
        ConfigurationError,
        "'DualPipeV' was requested for 4 stages and 2 parts of a batch",
    ),
    "plugin": (plugin_alone, ConfigurationError, "Beside pp it shards along dp_shard"),
    "schedule": (unknown_schedule, ConfigurationError, "'1f2b' was requested .* 1F1B"),
}


def test_what_stages_can_not_do_is_refused_on_all_processes() -> None:
    run_on_ranks(check_refused, 2, REFUSED)


def uneven_parts() -> list[float]:
    accelerator = Accelerator(cpu=True, **staged(num_microbatches=4))
    model = accelerator.prepare(eight_layers())
    found: list[float] = model.eval()(torch.linspace(0, 1, 42).reshape(7, 6)).flatten().tolist()
    return found


def test_a_forward_takes_batches_of_any_size() -> None:
    wanted = eight_layers()(torch.linspace(0, 1, 42).reshape(7, 6)).flatten().tolist()
    assert run_on_ranks(uneven_parts, 2) == [pytest.approx(wanted), pytest.approx(wanted)]


def first_loss() -> float:
    torch.set_default_dtype(torch.float64)
    accelerator = Accelerator(cpu=True, **staged(num_microbatches=4))
    model = accelerator.prepare(eight_layers())
    batch = random_batches()[0]
    return accelerator.train_step(model, batch, loss_fn=nn.functional.mse_loss, targets=batch.roll(1, 1)).item()


def test_a_loss_is_the_same_on_all_processes_where_torch_has_another_default_type() -> None:
    first, last = run_on_ranks(first_loss, 2)
    assert first == last > 0.1
