"""Training with sharded weights: every kind of model ends in the weights of one process, or is refused by name."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accelerate_nb import Accelerator, ConfigurationError, ParallelismConfig
from accelerate_nb.utils import FullyShardedDataParallelPlugin
from tests.ranks import run_on_ranks
from tests.runtime.strategies.test_fsdp_as_accelerate import Net, whole

ROUNDING: dict[str, float] = {"rtol": 0, "atol": 1e-6}
STEPS, MOST = 4, 0.2


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1, momentum=0.9)


def sharding(accumulation: int = 1, precision: str = "no", **settings: Any) -> Accelerator:
    """An accelerator that shards; `settings` are those of its plugin."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **settings)
    how = {"gradient_accumulation_steps": accumulation, "mixed_precision": precision}
    return Accelerator(cpu=True, fsdp_plugin=plugin, **how)


def batches(count: int = STEPS) -> list[Tensor]:
    """Batches of all ranks together."""
    return list(torch.randn(count, 8, 8, generator=torch.Generator().manual_seed(5)))


def own(accelerator: Accelerator, batch: Tensor) -> Tensor:
    return batch[accelerator.process_index :: accelerator.num_processes]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(batch).float(), batch.flip(1))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> list[float]:
    norms = []
    for batch in batches():
        accelerator.backward(loss_of(model, own(accelerator, batch)))
        norms.append(float(whole(accelerator.clip_grad_norm_(model.parameters(), MOST))))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def by_hand(model: nn.Module, make: Callable[[nn.Module], Any] = sgd) -> list[float]:
    optimizer, norms = make(model), []
    for batch in batches():
        loss_of(model, batch).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MOST)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def check_equal(model: nn.Module, make: Callable[[nn.Module], Any] = sgd, **settings: Any) -> Any:
    """Train a copy by hand and the model on shards, and compare; returns the prepared model."""
    reference = copy.deepcopy(model)
    norms = by_hand(reference, make)
    accelerator = sharding(**settings)
    prepared, optimizer = accelerator.prepare(model, make(model))
    torch.testing.assert_close(train(accelerator, prepared, optimizer), norms, **ROUNDING)
    torch.testing.assert_close(_plain(weights(accelerator.unwrap_model(prepared))), weights(reference), **ROUNDING)
    return prepared


def _plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in state.items()}


def sharded_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}


# ------------------------------------------------------------------------------------------------------------------- blocks


def wraps_blocks() -> None:
    blocks = {"", "blocks.0", "blocks.1"}
    by_class = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    assert sharded_names(check_equal(Net(), **by_class)) == blocks
    assert sharded_names(check_equal(Net())) == blocks
    in_sequence, plain = Net(), Net()
    in_sequence.blocks = nn.Sequential(*in_sequence.blocks)
    assert sharded_names(check_equal(in_sequence)) == blocks
    plain.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))
    assert sharded_names(check_equal(plain)) == {""}
    by_size = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 60}
    assert sharded_names(check_equal(Net(), **by_size)) >= {"", "first", "last"}
    partial_size = {"auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=60)}
    assert sharded_names(check_equal(Net(), **partial_size)) == sharded_names(check_equal(Net(), **by_size))
    named = Net()
    named._no_split_modules = ["Linear"]
    assert sharded_names(check_equal(named)) == {
        "", "first", "last", *(f"blocks.{number}.{name}" for number in (0, 1) for name in ("inner", "outer"))
    }  # fmt: skip
    alone = {**by_class, "transformer_cls_names_to_wrap": ["Net"]}
    assert sharded_names(check_equal(Net(), **alone)) == {""}
    recomputes = dict.fromkeys(("activation_checkpointing", "activation_checkpointing_offload"), True)
    assert len(sharded_names(check_equal(Net(), **recomputes))) == 3
    repeated = Net()
    repeated.blocks[1] = repeated.blocks[0]
    check_equal(repeated, **recomputes, **by_class)


def test_blocks_are_chosen_by_class_by_size_by_the_model_or_because_they_are_equal() -> None:
    run_on_ranks(wraps_blocks)


class Tied(Net):
    """The last layer has the first one's weight, and the two layers of a block theirs."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        for block in self.blocks:
            block.inner, block.outer = nn.Linear(8, 8), nn.Linear(8, 8)
            block.outer.weight = block.inner.weight


class TiedAcross(Net):
    """Blocks have a weight together."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].inner.weight = self.blocks[0].inner.weight


def keeps_ties() -> None:
    model = check_equal(Tied())
    assert model.last.weight is model.first.weight
    assert isinstance(model.last.weight, DTensor)
    assert all(block.inner.weight is block.outer.weight for block in model.blocks)
    assert sharded_names(model) == {"", "blocks.0", "blocks.1"}
    across = check_equal(TiedAcross())
    assert across.blocks[0].inner.weight is across.blocks[1].inner.weight


def test_tied_weights_stay_one_weight() -> None:
    run_on_ranks(keeps_ties)


class Uneven(nn.Module):
    """Weights of one row and of three, which two ranks can't have equal parts of, and one without any numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 3)
        self.middle = nn.Linear(3, 1)
        self.last = nn.Linear(1, 8)
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.middle(self.first(inputs))) + self.empty.sum()
        return outputs


class Scaled(nn.Module):
    """A factor without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.factor * self.layer(inputs)
        return outputs


def shards_odd_shapes() -> None:
    torch.manual_seed(0)
    check_equal(Uneven())
    accelerator = sharding()
    with pytest.raises(ConfigurationError, match=r"factor .*no dimension"):
        accelerator.prepare(Scaled())
    model = nn.Sequential(Scaled(), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    check_equal(model, ignored_modules="0")


def test_weights_that_do_not_divide_are_sharded_and_one_without_a_dimension_is_refused_by_name() -> None:
    run_on_ranks(shards_odd_shapes)


class WithBuffers(Net):
    """Statistics, a table that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("saved", torch.arange(8.0) / 8)
        self.register_buffer("unsaved", torch.arange(8.0) / 4, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.norm(super().forward(inputs) + self.saved + self.unsaved)
        return outputs


def keeps_buffers() -> None:
    model = WithBuffers()
    accelerator = sharding()
    if not accelerator.is_main_process:
        model.saved.zero_()
        model.unsaved.zero_()
    model, optimizer = accelerator.prepare(model, sgd(model))
    train(accelerator, model, optimizer)
    assert "saved" in model.state_dict()
    assert "unsaved" not in model.state_dict()
    assert int(model.norm.num_batches_tracked) == STEPS
    assert not isinstance(model.norm.running_mean, DTensor)
    assert model.saved.tolist() == (torch.arange(8.0) / 8).tolist()
    assert model.unsaved.tolist() == (torch.arange(8.0) / 4).tolist()


def test_buffers_are_whole_and_the_first_ranks() -> None:
    run_on_ranks(keeps_buffers)


def ignores_modules() -> None:
    for ignored in ("last", "l.st", "modules"):
        model = Net()
        model.last.weight.requires_grad_(False)
        prepared = check_equal(model, ignored_modules=[model.last] if ignored == "modules" else ignored)
        assert not isinstance(prepared.last.weight, DTensor)
        assert isinstance(prepared.first.weight, DTensor)
    accelerator = sharding(ignored_modules="last")
    model = Net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    loss_of(model, batches()[0]).backward()
    with pytest.warns(UserWarning, match="not sharded"):
        optimizer.step()
    with pytest.raises(ConfigurationError, match="no module's name matches"):
        sharding(ignored_modules="nothing").prepare(Net())


def test_ignored_modules_stay_whole_and_a_warning_names_those_that_learn() -> None:
    run_on_ranks(ignores_modules)


# ---------------------------------------------------------------------------------------------------------- initial weights


def two_layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def begins_alike(meta: str) -> None:
    accelerator = sharding()
    with torch.device("meta" if meta == "all" or (meta == "others" and not accelerator.is_main_process) else "cpu"):
        model = two_layers(accelerator.process_index)
    optimizer = sgd(model)
    wanted = two_layers(0)
    torch.manual_seed(3)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = weights(model)
    if meta != "all":
        torch.testing.assert_close(found, weights(wanted), rtol=0, atol=0)
    assert all(value.abs().sum() > 0 for value in found.values())
    before = {name: value.clone() for name, value in found.items()}
    train(accelerator, model, optimizer)
    assert all((value != before[name]).any() for name, value in weights(model).items())


@pytest.mark.parametrize("meta", ["none", "others", "all"])
def test_all_begin_with_the_first_ranks_weights(meta: str) -> None:
    run_on_ranks(begins_alike, 2, meta)


class Census(TorchDispatchMode):
    """The largest number of bytes in storages that were made inside, and are alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import weakref

        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.device.type == "cpu":
                storage = value.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.largest = max(self.largest, sum(self.alive.values()))
        return result


def loads_with_little_memory(blocks: int) -> tuple[int, int]:
    accelerator = sharding()
    with torch.device("cpu" if accelerator.is_main_process else "meta"):
        model = nn.Sequential(nn.ModuleList([nn.Linear(256, 256) for _ in range(blocks)]))
    total = sum(weight.nbytes for weight in model.parameters())
    with Census() as census:
        accelerator.prepare(model)
    return census.largest, total


def test_a_rank_that_begins_on_meta_never_holds_the_whole_model() -> None:
    _, (largest, total) = run_on_ranks(loads_with_little_memory, 2, 16)
    assert 0.5 < largest / total < 0.75


# --------------------------------------------------------------------------------------------------------------- optimizers


def groups(model: nn.Module) -> torch.optim.Optimizer:
    parts = [{"params": [model.first.weight], "lr": 0.01}, {"params": list(model.blocks.parameters())}]
    return torch.optim.SGD([*parts, {"params": [model.last.weight], "lr": 0.0}], lr=0.2, momentum=0.9)


def trains_groups_and_parts(folder: str) -> None:
    prepared = check_equal(Net(), groups)
    torch.testing.assert_close(whole(prepared.last.weight), Net().last.weight.detach(), rtol=0, atol=0)
    # most of it is frozen, as with LoRA
    model = Net()
    model.requires_grad_(False)
    model.blocks[0].inner.requires_grad_(True)
    check_equal(model)
    # two models with an optimizer each
    accelerator, models = sharding(), [Net(0), Net(1)]
    references = copy.deepcopy(models)
    # which are prepared before their models
    first, second = accelerator.prepare(*[sgd(model) for model in models])
    models = accelerator.prepare(*models)
    for model, optimizer, reference in zip(models, (first, second), references, strict=True):
        train(accelerator, model, optimizer)
        by_hand(reference)
        torch.testing.assert_close(weights(model), weights(reference), **ROUNDING)
    _check_saved(accelerator, models, (first, second), f"{folder}/models")
    # two optimizers of one model
    accelerator, model = sharding(), Net()
    one = torch.optim.SGD(model.blocks.parameters(), 0.1, 0.9)
    other = torch.optim.AdamW([model.first.weight, model.last.weight])
    model, one, other = accelerator.prepare(model, one, other)
    for batch in batches():
        accelerator.backward(loss_of(model, own(accelerator, batch)))
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    _check_saved(accelerator, [model], (one, other), f"{folder}/optimizers")


def _check_saved(accelerator: Accelerator, models: Any, optimizers: Any, folder: str) -> None:
    def content() -> Any:
        states = [
            {str(key): whole(value) for key, value in state.items() if isinstance(value, Tensor)}
            for optimizer in optimizers
            for state in optimizer.state.values()
        ]
        return [weights(model) for model in models], states

    wanted = copy.deepcopy(content())
    for name in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        accelerator.state.fsdp_plugin.set_state_dict_type(name)
        accelerator.save_state(f"{folder}/{name}")
        with torch.no_grad():
            for model in models:
                for weight in model.parameters():
                    weight.zero_()
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()
        accelerator.load_state(f"{folder}/{name}")
        torch.testing.assert_close(content(), wanted, rtol=0, atol=0)


def test_groups_frozen_weights_several_models_and_several_optimizers(tmp_path: Any) -> None:
    run_on_ranks(trains_groups_and_parts, 2, str(tmp_path))


# ------------------------------------------------------------------------------------------------------------- accumulation


def reductions(calls: CommDebugMode) -> int:
    """How often gradients were sent."""
    return sum(count for call, count in calls.get_comm_counts().items() if "reduce" in str(call))


def accumulates() -> None:
    accelerator, model = sharding(2), Net()
    model, _ = accelerator.prepare(model, sgd(model))
    first = own(accelerator, batches()[0])
    for batch, count in zip(batches(4), (0, 3, 0, 3), strict=True):
        with accelerator.accumulate(model), CommDebugMode() as calls:
            accelerator.backward(loss_of(model, own(accelerator, batch)))
        assert reductions(calls) == count
    with accelerator.no_sync(model), CommDebugMode() as calls:
        loss_of(model, first).backward()
    assert reductions(calls) == 0
    with accelerator.no_sync(model), accelerator.trigger_sync_in_backward(model), CommDebugMode() as calls:
        accelerator.backward(loss_of(model, first))
    assert reductions(calls) == 3
    with accelerator.no_sync(model):
        held = loss_of(model, first)
    with accelerator.trigger_sync_in_backward(model), CommDebugMode() as calls:
        accelerator.backward(held)
    assert reductions(calls) == 3
    with CommDebugMode() as calls:
        loss_of(model, first).backward()
    assert reductions(calls) == 3


def test_gradients_are_sent_once_a_window() -> None:
    run_on_ranks(accumulates)


# ----------------------------------------------------------------------------------------------------------------- clipping


def clips() -> None:
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        reference, accelerator, model = Net(), sharding(ignored_modules="last"), Net()
        model = accelerator.prepare(model)
        same = batches()[0]  # all ranks have it, so that a whole gradient is equal on all of them
        loss_of(reference, same).backward()
        accelerator.backward(loss_of(model, same))
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
        found = accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        torch.testing.assert_close(whole(found), wanted)
        _compare_gradients(model, reference)
        nn.utils.clip_grad_value_(reference.parameters(), 1e-3)
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        _compare_gradients(model, reference)


def _compare_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, weight), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(weight, DTensor) == (name != "last.weight")
        torch.testing.assert_close(whole(weight.grad), wanted.grad, **ROUNDING)


def test_whole_gradients_and_parts_are_clipped_together_by_any_norm() -> None:
    run_on_ranks(clips)


# ---------------------------------------------------------------------------------------------------- precision and memory


def trains_in_precisions() -> None:
    accelerator = sharding(precision="bf16")
    model = Net(persistent=False).to(torch.bfloat16)
    model, optimizer = accelerator.prepare(model, sgd(model))
    reference = Net(persistent=False).to(torch.bfloat16).float()
    train(accelerator, model, optimizer)
    by_hand(reference)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    torch.testing.assert_close(weights(model), weights(reference), rtol=0, atol=5e-3)
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32, output_dtype=torch.float16)
    accelerator = sharding(mixed_precision_policy=policy)
    model = Net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    assert model(batches()[0]).dtype == torch.float16
    train(accelerator, model, optimizer)
    reference = Net()
    by_hand(reference)
    torch.testing.assert_close(weights(model), weights(reference), rtol=0, atol=1e-3)


def test_the_precision_or_the_users_policy_decides_what_is_computed_in() -> None:
    run_on_ranks(trains_in_precisions)


def trains_with_one_plugin() -> None:
    plugin, found = FullyShardedDataParallelPlugin(fsdp_version=2), []
    for precision in ("bf16", "bf16", "no"):
        accelerator, model = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision), Net()
        model, _ = accelerator.prepare(model, sgd(model))
        found.append(model._get_fsdp_state()._mp_policy)
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, cast_forward_inputs=False)
    assert found == [bf16, bf16, MixedPrecisionPolicy()]


def test_a_plugin_that_several_accelerators_have_gets_the_precision_of_each() -> None:
    run_on_ranks(trains_with_one_plugin)


def compiles() -> None:
    from accelerate_nb.utils import TorchDynamoPlugin

    for regional in (False, True):
        reference = Net()
        by_hand(reference)
        dynamo = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
        plugin, model = FullyShardedDataParallelPlugin(fsdp_version=2), Net()
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, dynamo_plugin=dynamo)
        model, optimizer = accelerator.prepare(model, sgd(model))
        train(accelerator, model, optimizer)
        bare = accelerator.unwrap_model(model, keep_torch_compile=False)
        torch.testing.assert_close(weights(bare), weights(reference), **ROUNDING)
        torch._dynamo.reset()


@pytest.mark.slow
def test_a_compiled_model_gives_equal_numbers() -> None:
    run_on_ranks(compiles)


def evaluates() -> None:
    accelerator, model = sharding(), Net()
    wanted = Net()(torch.cat(batches()))
    data = torch.utils.data.DataLoader(torch.cat(batches())[:29], batch_size=4)
    model, loader = accelerator.prepare(model, data)
    model.eval()
    with torch.no_grad():
        found = torch.cat([accelerator.gather_for_metrics(model(batch)) for batch in loader])
    torch.testing.assert_close(found, wanted[:29].detach(), **ROUNDING)
    model.train()
    optimizer = accelerator.prepare(sgd(model))
    train(accelerator, model, optimizer)
    reference = Net()
    by_hand(reference)
    torch.testing.assert_close(weights(model), weights(reference), **ROUNDING)
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    assert (model, optimizer, loader) == (None, None, None)
    check_equal(Net())


def test_it_evaluates_is_freed_and_a_second_accelerator_trains() -> None:
    run_on_ranks(evaluates)


def does_not_join() -> tuple[int, list[str]]:
    accelerator, model = sharding(), Net()
    loader = torch.utils.data.DataLoader(torch.cat(batches())[:12], batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    count = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for batch in loader:
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                count += 1
    return count, [str(entry.message) for entry in caught if "join_uneven_inputs" in str(entry.message)]


def test_uneven_batches_are_not_joined_which_is_warned_of_and_stay_even() -> None:
    for count, warned in run_on_ranks(does_not_join):
        assert (count, len(warned)) == (2, 1)


# ------------------------------------------------------------------------------------------------------------------- errors


def complains(folder: str) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(ConfigurationError, match="Leave one of them out"):
        Accelerator(cpu=True, fsdp_plugin=plugin, strategy="ddp")
    with pytest.raises(ConfigurationError, match=r"make 4 ranks, but there are 2\. .* one of these fits: dp_shard=2"):
        Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=4))
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, stranger = accelerator.prepare(Net(), sgd(Net(1)))
    del model
    with pytest.raises(ConfigurationError, match="in no prepared model"):
        accelerator.save_state(folder)
    del stranger


def test_what_does_not_fit_is_named(tmp_path: Any) -> None:
    run_on_ranks(complains, 2, str(tmp_path / "checkpoint"))
