"""Objects are prepared in any order and number, once."""

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError, StateError
from accelerate_nb.optimizer import AcceleratedOptimizer
from accelerate_nb.runtime.world.registry import forget
from accelerate_nb.scheduler import AcceleratedScheduler
from accelerate_nb.transport.payload import FunctionCall, pack
from accelerate_nb.utils import DummyOptim, DummyScheduler, MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from accelerate_nb.utils.dataclasses import DistributedDataParallelKwargs, GradScalerKwargs
from tests.peers import Peer, under_both
from tests.ranks import ONE_OR_TWO, run_on_ranks
from tests.runtime.loops import net, samples


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    forget()


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), DataLoader(samples(8), batch_size=4)


def test_things_come_back_in_the_order_in_which_they_were_given(accelerator: Accelerator) -> None:
    model, optimizer, schedule, loader = parts()
    prepared = accelerator.prepare("as it is", schedule, loader, model, None, optimizer)
    assert prepared[0] == "as it is"
    assert prepared[4] is None
    assert isinstance(prepared[1], AcceleratedScheduler)
    assert isinstance(prepared[2], DataLoader)
    assert prepared[3] is model
    assert isinstance(prepared[5], AcceleratedOptimizer)
    assert [optimizer.optimizer for optimizer in prepared[1].optimizers] == [optimizer]

    assert accelerator.prepare(model) is model  # one object comes back alone
    assert accelerator.prepare() == ()
    with pytest.raises(ConfigurationError, match="1 values for 2 objects"):
        accelerator.prepare(net(), net(), device_placement=[True])


def test_preparing_twice_is_preparing_once_and_freed_memory_is_forgotten(accelerator: Accelerator) -> None:
    once = accelerator.prepare(*parts())
    again = accelerator.prepare(*once)
    assert all(first is second for first, second in zip(once, again, strict=True))
    lists = ("_models", "_optimizers", "_schedulers", "_dataloaders")
    assert [len(getattr(accelerator, name)) for name in lists] == [1] * 4
    assert all(item._is_accelerate_prepared for item in once)
    accelerator.step = 3
    assert accelerator.free_memory(*once) == [None] * 4
    assert accelerator.step == 0
    assert [getattr(accelerator, name) for name in lists] == [[]] * 4
    model = weakref.ref(once[0])
    del once, again
    gc.collect()
    assert model() is None


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.computed_in: torch.dtype | None = None

    def forward(self, inputs: torch.Tensor) -> dict[str, Any]:
        """What goes in, doubled by nobody."""
        outputs = self.inner(inputs)
        self.computed_in = outputs.dtype
        return {"outputs": outputs, "more": [outputs, "text"]}


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_mixed_forward_computes_in_few_bits_and_returns_many(name: str, dtype: torch.dtype) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=name)
    model = accelerator.prepare(Autocast())
    outputs = model(torch.ones(1, 2))
    assert model.computed_in == dtype
    assert (outputs["outputs"].dtype, outputs["more"][0].dtype, outputs["more"][1]) == (*[torch.float32] * 2, "text")
    assert model.forward.__doc__ == Autocast.forward.__doc__


def test_a_copy_of_a_mixed_model_has_its_own_weights_and_an_unwrapped_one_can_lose_its_forward() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Autocast())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.inner.weight.zero_()
        twin.inner.bias.zero_()
    assert twin(torch.ones(1, 2))["outputs"].abs().sum() == 0
    assert model(torch.ones(1, 2))["outputs"].abs().sum() > 0
    assert hasattr(accelerator.unwrap_model(model), "_original_forward")
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert bare is model
    assert "forward" not in vars(bare)
    bare(torch.ones(1, 2))
    assert bare.computed_in == torch.float32
    pickle.dumps(bare)


def wrapped() -> list[Any]:
    options = DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook="fp16")
    accelerator = Accelerator(kwargs_handlers=[options])
    frozen = accelerator.prepare(nn.Linear(2, 2).requires_grad_(False))
    model, evaluated = net(), accelerator.prepare_model(net(), evaluation_mode=True)
    prepared = accelerator.prepare(model)
    prepared(torch.ones(1, 8)).sum().backward()
    return [
        isinstance(prepared, DistributedDataParallel) and prepared.find_unused_parameters,
        accelerator.unwrap_model(prepared) is model,
        isinstance(frozen, DistributedDataParallel),
        isinstance(evaluated, DistributedDataParallel),
        len(prepared._comm_hooks),
    ]


def test_only_what_learns_is_wrapped_for_many_processes() -> None:
    assert run_on_ranks(wrapped, 2) == [[True, True, False, False, 1]] * 2


def test_an_optimizer_can_be_copied_and_pickled_before_its_first_step_and_after(accelerator: Accelerator) -> None:
    model = net()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(2):
        for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            twin.step()
            assert twin.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
        pack(FunctionCall(optimizer.step, (), {}))  # it goes to other processes without its Accelerator, which can't
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()


def test_a_schedule_made_around_a_prepared_optimizer_follows_it(accelerator: Accelerator) -> None:
    model = net()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5]
    accelerator.sync_gradients = False
    schedule.step()
    assert schedule.get_last_lr() == [0.5]


def fp16(**scaling: Any) -> tuple[Accelerator, nn.Parameter, Any]:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**scaling)])
    parameter = nn.Parameter(torch.ones(1))
    return accelerator, parameter, accelerator.prepare(torch.optim.SGD([parameter], lr=0.1))


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_optimizer_that_leaves_a_step_out_by_itself_is_known_to_have_done_so(
    optimizer_class: type[torch.optim.Optimizer], clips: bool
) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    parameter = nn.Parameter(torch.ones(1))
    optimizer = optimizer_class([parameter], lr=0.1, fused=True)  # type: ignore[call-arg]  # of each torch optimizer
    optimizer, schedule = accelerator.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    found = []
    for factor in (float("inf"), 1.0, float("inf")):
        accelerator.backward(parameter.sum() * factor)
        if clips:
            accelerator.clip_grad_norm_([parameter], 10.0)
        before = parameter.item()
        optimizer.step()
        assert optimizer._is_overflow == accelerator.optimizer_step_was_skipped
        schedule.step()
        optimizer.zero_grad()
        found.append((accelerator.optimizer_step_was_skipped, parameter.item() == before, schedule.get_last_lr()))
    assert found == [(True, True, [0.1]), (False, False, [0.05]), (True, True, [0.05])]


def test_two_optimizers_step_by_their_true_gradients_clipped_together_or_with_those_left_from_another_loss() -> None:
    accelerator, first, first_optimizer = fp16(init_scale=1024.0)
    second = nn.Parameter(torch.ones(1))
    second_optimizer = accelerator.prepare(torch.optim.SGD([second], lr=0.1))
    for _ in range(2):
        accelerator.backward(first.sum() + second.sum())
        accelerator.clip_grad_norm_([first], 10.0)
        accelerator.clip_grad_norm_([second], 10.0)
        first_optimizer.step()
        second_optimizer.step()
        first_optimizer.zero_grad()
        second_optimizer.zero_grad()
    assert (round(first.item(), 4), round(second.item(), 4)) == (0.8, 0.8)
    accelerator.backward(first.sum() + second.sum())  # the discriminator's loss reaches the generator, too
    accelerator.clip_grad_norm_([first], 10.0)
    first_optimizer.step()
    second_optimizer.zero_grad()
    accelerator.backward(second.sum())
    accelerator.clip_grad_norm_([second], 10.0)
    second_optimizer.step()
    assert round(second.item(), 4) == 0.7


def test_an_optimizer_steps_by_the_scale_of_the_accelerator_that_prepared_it_last() -> None:
    _, parameter, optimizer = fp16(init_scale=64.0)
    accelerator = fp16(init_scale=1024.0)[0]
    assert accelerator.prepare(optimizer) is optimizer
    accelerator.backward(parameter.sum())
    optimizer.step()
    assert parameter.item() == pytest.approx(0.9)


GENERATIONS = [("bf16", 2), ("no", 1), ("bf16", 3)]


def generations(ends: bool) -> list[Any]:
    """What Accelerators in turn make of one model, also where the former one has not ended."""
    seen: list[Any] = []
    torch.manual_seed(0)
    model = Autocast()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(torch.arange(24.0).view(12, 2), batch_size=2)
    prepared: Any = model
    for precision, steps in GENERATIONS:
        accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=steps)
        prepared, optimizer, loader = accelerator.prepare(prepared, optimizer, loader)
        synced = []
        for inputs in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(inputs)["outputs"].sum())
                optimizer.step()
                optimizer.zero_grad()
                synced.append(accelerator.sync_gradients)
        weights = accelerator.gather(model.inner.weight.detach()[None])
        is_equal = bool((weights == weights[0]).all())
        seen.append((model.computed_in, isinstance(optimizer.optimizer, torch.optim.SGD), synced, is_equal))
        if ends:
            accelerator.end_training()
    return [*seen, accelerator.unwrap_model(prepared) is model]


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_what_was_prepared_before_is_prepared_anew_by_a_second_accelerator(size: int, ends: bool) -> None:
    batches = 6 // size
    expected: list[Any] = []
    for precision, steps in GENERATIONS:
        synced = [batch % steps == 0 or batch == batches for batch in range(1, batches + 1)]
        expected.append((torch.float32 if precision == "no" else torch.bfloat16, True, synced, True))
    assert run_on_ranks(generations, size, ends) == [[*expected, True]] * size


def prepared_again(*objects: Any) -> list[Any]:
    model, *others = Accelerator(cpu=True).prepare(*objects)
    return [isinstance(model, DistributedDataParallel), torch.cat(list(others[1])).tolist(), (model.module, *others)]


def test_what_another_launch_prepared_is_prepared_anew_and_its_loader_goes_on(accelerator: Accelerator) -> None:
    model, optimizer, _, _ = parts()
    objects = accelerator.prepare(model, optimizer, DataLoader(torch.arange(4), batch_size=1))
    for epoch in (1, 2):
        results = run_on_ranks(prepared_again, 2, *objects)
        assert [result[:2] for result in results] == [[True, [0, 2]], [True, [1, 3]]]
        objects = results[0][2]
        assert objects[2].iteration == epoch


def many_accelerators() -> float:
    for _ in range(300):
        accelerator = Accelerator()
    return accelerator.gather(torch.ones(1)).sum().item()


def test_a_worker_may_make_any_number_of_accelerators() -> None:
    assert run_on_ranks(many_accelerators, 2, limit=30) == [2.0, 2.0]


class UpdatesInBackward(torch.optim.Optimizer):
    """An optimizer as lomo-optim's: it updates weights in a backward of its own, and has no step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def fused_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        loss.backward()
        for parameter in self.param_groups[0]["params"]:
            parameter.data -= learning_rate * parameter.grad


def test_an_optimizer_may_update_weights_in_a_backward_of_its_own() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    parameter = nn.Parameter(torch.ones(1))
    with pytest.raises(StateError, match="no LOMO optimizer is prepared"):
        accelerator.lomo_backward(parameter.sum(), 0.5)
    assert not accelerator.has_lomo_optimizer
    optimizer = accelerator.prepare(UpdatesInBackward([parameter]))
    assert accelerator.has_lomo_optimizer
    accelerator.backward(parameter.sum(), learning_rate=0.5)
    optimizer.step()
    optimizer.zero_grad()
    assert (parameter.item(), parameter.grad) == (0.75, None)
    accelerator.lomo_backward(parameter.sum(), 0.5)
    assert parameter.item() == 0.25
    with pytest.raises(ConfigurationError, match="A learning rate must be passed"):
        accelerator.lomo_backward(parameter.sum(), None)


def clipped(peer: Peer) -> list[Any]:
    accelerator = peer.Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    model = net()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found: list[Any] = []
    for norm, norm_type in ((0.1, 2), (0.1, float("inf")), (100.0, 1)):
        accelerator.backward(prepared(torch.ones(4, 8)).square().sum())
        accelerator.unscale_gradients()
        accelerator.unscale_gradients(optimizer)
        found.append(accelerator.clip_grad_norm_(prepared.parameters(), norm, norm_type=norm_type).item())
        found.append([parameter.grad.tolist() for parameter in model.parameters()])
        accelerator.clip_grad_value_(prepared.parameters(), 0.01)
        found.append([parameter.grad.tolist() for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return [*found, [parameter.tolist() for parameter in model.parameters()]]


@pytest.mark.slow
@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_gradients_are_clipped_as_accelerates_are(size: int) -> None:
    both = under_both(clipped, size)
    assert both.ours == both.theirs


@pytest.mark.parametrize(
    ("placeholder", "strategy"),
    [
        *((DummyOptim([]), "deepspeed"), (DummyScheduler(None), "deepspeed")),
        *((MegatronLMDummyScheduler(None), "megatron"), (MegatronLMDummyDataLoader(), "megatron")),
    ],
    ids=type,
)
def test_a_placeholder_that_no_strategy_takes_names_the_one_that_makes_it(placeholder: Any, strategy: str) -> None:
    message = rf"a {type(placeholder).__name__}, a placeholder .* Pass strategy={re.escape(repr(strategy))}"
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True).prepare(placeholder)
