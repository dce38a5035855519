"""The precisions of a step: the scaler of fp16 knows weights of every layout, in every order; an XLA device needs none."""

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from accelerate_nb import Accelerator, GradScalerKwargs
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.optimizer import AcceleratedOptimizer
from accelerate_nb.runtime.operations.sharded_tensors import local
from accelerate_nb.runtime.precision.registry import PrecisionOptions
from accelerate_nb.runtime.strategies.xla_ddp import XlaDDP
from accelerate_nb.runtime.world.world import World
from tests.ranks import run_on_ranks

LAYOUTS = ("plain", "replicated", "sharded")
SCALE = 1024.0


def steps(overflows: bool) -> list[tuple[bool, float, list[list[float]]]]:
    """Of optimizers whose weights stand in each order: whether a step was left out, the next scale, and the gradients."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=SCALE)])
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for order in permutations(LAYOUTS):
        weights = {name: nn.Parameter(laid_out(torch.ones(4), name, mesh)) for name in order}
        optimizer = accelerator.prepare(torch.optim.SGD(weights.values(), lr=0.1, foreach=False))
        accelerator.scaler.update(SCALE) if found else accelerator.scaler.scale(torch.ones(1))
        for name, weight in weights.items():
            gradient = torch.full((4,), 2 * SCALE)
            if overflows and name == "sharded":
                gradient[3] = torch.inf  # the last rank's
            weight.grad = laid_out(gradient, name, mesh)
        accelerator.unscale_gradients()
        gradients = [local(weight.grad).tolist() for weight in weights.values()]
        optimizer.step()
        found.append((optimizer.step_was_skipped, accelerator.scaler.get_scale(), gradients))
        accelerator.free_memory()
    accelerator.end_training()
    return found


def laid_out(values: torch.Tensor, name: str, mesh: Any) -> torch.Tensor:
    if name == "plain":
        return values
    return distribute_tensor(values, mesh, [Shard(0) if name == "sharded" else Replicate()])


def test_an_overflow_in_one_ranks_shard_is_known_to_all_and_gradients_of_every_layout_are_unscaled_once() -> None:
    for found in run_on_ranks(steps, 2, True):
        assert [(skipped, scale) for skipped, scale, _ in found] == [(True, SCALE / 2)] * 6
    for found in run_on_ranks(steps, 2, False):
        assert [(skipped, scale) for skipped, scale, _ in found] == [(False, SCALE)] * 6
        assert all(set(gradient) == {2.0} for _, _, gradients in found for gradient in gradients)


def two_micro_steps(clip: str | None, first: float = 1.0) -> tuple[list[float], bool]:
    """The weight and its last gradient after a window in which each micro-step clips, and whether the step was left out."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=SCALE)])
    weight = nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    accelerator.gradient_accumulation_steps = 2
    for factor in (first, 3.0):
        with accelerator.accumulate():
            accelerator.backward((weight * factor).sum())
            for _ in range(2) if clip else ():
                getattr(accelerator, clip)([weight], 100.0)
            optimizer.step()
    return [weight.item(), weight.grad.item()], optimizer.step_was_skipped


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_gradients_that_are_clipped_in_each_micro_step_are_unscaled_like_others(clip: str) -> None:
    assert two_micro_steps(clip) == ([-1.0, 2.0], False)
    (weight, _), was_skipped = two_micro_steps(clip, torch.inf)
    assert (weight, was_skipped) == (1.0, True)


def test_clipping_for_one_optimizer_leaves_the_next_backward_of_another_scaled() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=SCALE)])
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = accelerator.prepare(*(torch.optim.SGD([weight], lr=1.0) for weight in weights))
    for weight, optimizer in zip(weights, optimizers, strict=True):
        accelerator.backward(weight.sum())
        accelerator.clip_grad_norm_([weight], 100.0)
        optimizer.step()
        optimizer.zero_grad()
    assert [weight.item() for weight in weights] == [0.0, 0.0]


@pytest.mark.parametrize("frees", [False, True])
def test_gradients_are_true_after_a_step_that_failed_and_after_memory_was_freed(frees: bool) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=SCALE)])
    weight = nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    accelerator.backward(weight.sum())
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    if frees:
        accelerator.free_memory()
        weight.grad = None
        accelerator.prepare(optimizer)
    accelerator.backward(weight.sum())
    optimizer.step()
    assert weight.item() == (0.0 if frees else -1.0)


def test_scaling_can_be_turned_off() -> None:
    off = GradScalerKwargs(enabled=False)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[off])
    weight = nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    for _ in range(2):
        accelerator.backward((3 * weight).sum())
        assert accelerator.clip_grad_norm_([weight], 1.0) == 3
        optimizer.step()
        optimizer.zero_grad()
    assert weight.item() == pytest.approx(-1)


def test_a_scaler_can_be_taken_away_from_an_accelerator_and_from_an_optimizer() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=SCALE)])
    weight = nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    optimizer.scaler = None
    accelerator.backward(weight.sum())
    optimizer.step()
    # as in Accelerate: the loss is scaled still, and nobody divides
    assert weight.item() == 1 - SCALE
    optimizer.zero_grad()
    accelerator.scaler = None
    accelerator.backward((3 * weight).sum())
    assert accelerator.clip_grad_norm_([weight], 1.0) == 3
    optimizer.step()
    assert weight.item() == pytest.approx(-SCALE)


@pytest.mark.parametrize("precision", [None, "no", "fp16"])
def test_an_optimizer_steps_through_the_scaler_that_it_was_given(precision: str | None) -> None:
    scaler, weight = torch.amp.GradScaler("cpu", init_scale=SCALE), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    wrapped = AcceleratedOptimizer(optimizer, scaler=scaler)
    if precision is not None:
        wrapped = Accelerator(cpu=True, mixed_precision=precision).prepare(optimizer)
        wrapped.scaler = scaler
    seen = []
    for factor in (1.0, torch.inf):
        scaler.scale((weight * factor).sum()).backward()
        wrapped.step()
        wrapped.zero_grad()
        seen.append((weight.item(), wrapped.step_was_skipped, scaler.get_scale()))
    assert seen == [(0.0, False, SCALE), (0.0, True, SCALE / 2)]


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_numbers_that_these_devices_do_not_compute_in_are_refused(name):
    with pytest.raises(ConfigurationError, match="Use mixed_precision='bf16'"):
        XlaDDP(World(0, 1, 0, 1, torch.device("xla:0"), None)).choose_precision(name, PrecisionOptions())
