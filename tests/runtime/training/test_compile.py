"""A compiled model is trained, saved and taken apart as one that is not."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from accelerate_nb import Accelerator, FullyShardedDataParallelPlugin, load_checkpoint_in_model
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.training import compile
from accelerate_nb.runtime.training.unwrap import extract_model_from_parallel
from tests.peers import Peer, under_both
from tests.ranks import ONE_OR_TWO, run_on_ranks
from tests.runtime.loops import samples


class Blocks(nn.Module):
    """A model as transformers are built: repeated blocks with something before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.last(self.norm(hidden))


def training(peer: Peer, regional: bool, precision: str, folder: str) -> list[Any]:
    torch.manual_seed(0)
    plugin = peer.door("utils").TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    settings = {"mixed_precision": precision, "gradient_accumulation_steps": 2, "dynamo_plugin": plugin}
    accelerator = peer.Accelerator(cpu=True, **settings)
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(24), batch_size=4))
    seen = []
    for inputs, targets in loader:
        with accelerator.accumulate(prepared):
            loss = nn.functional.mse_loss(prepared(inputs), targets)
            accelerator.backward(loss)
            seen.append((loss.item(), [parameter.grad.sum().item() for parameter in model.parameters()]))
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    bare = accelerator.unwrap_model(prepared, keep_torch_compile=False)
    weights = [parameter.detach().clone() for parameter in bare.parameters()]
    saved = list(bare.state_dict())
    if peer.is_ours:
        accelerator.save_state(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(folder)
        assert all(torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True))
        assert bare is model
        assert list(accelerator.get_state_dict(prepared)) == saved
        names = list(prepared.state_dict())
        kept = accelerator.unwrap_model(prepared)
        assert list(prepared.state_dict()) == names  # what is trained goes on as it was
        assert compile.has_compiled_regions(kept)
        assert accelerator.unwrap_model(prepared) is kept
        assert accelerator.unwrap_model(kept, keep_torch_compile=False) is model
        prepared.eval(), kept.eval()
        probe = torch.ones(2, 8)
        assert torch.equal(kept(probe), prepared(probe))
    return [seen, [weight.tolist() for weight in weights], saved]


@pytest.mark.slow
@pytest.mark.parametrize("size", ONE_OR_TWO)
def test_a_compiled_training_gives_accelerates_numbers_and_is_saved_under_own_names(size: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    for regional, precision in ((False, "no"), (True, "bf16")):
        both = under_both(training, size, regional, precision, folder)
        assert both.ours == both.theirs
        shutil.rmtree(folder)


def whole_and_not(backend: str) -> list[Any]:
    seen = []
    for chosen in ("no", backend):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, dynamo_backend=chosen)
        model = Blocks()
        prepared = accelerator.prepare(model)
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(accelerator.process_index))
        with accelerator.no_sync(prepared):
            prepared(inputs).square().sum().backward()
        local = model.first.weight.grad.clone()
        prepared(inputs).square().sum().backward()
        seen.append((local, model.first.weight.grad.clone(), compile.is_compiled_module(prepared)))
        accelerator.end_training()
    (plain, plain_sum, was), (compiled, compiled_sum, is_now) = seen
    torch.testing.assert_close(plain, compiled)
    torch.testing.assert_close(plain_sum, compiled_sum)
    return [was, is_now, local.sum().item()]


@pytest.mark.slow
def test_a_compiled_model_holds_its_gradients_where_that_is_set() -> None:
    first, second = run_on_ranks(whole_and_not, 2, "aot_eager")
    assert first[:2] == second[:2] == [False, True]
    assert first[2] != second[2]


def by_inductor() -> float:
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # a pool of compilers takes longer to begin than one small graph to compile
    accelerator = Accelerator(cpu=True, dynamo_backend="inductor")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    prepared, inputs = accelerator.prepare(model), torch.ones(2, 8)
    with torch.no_grad():
        return (prepared(inputs) - model(inputs)).abs().max().item()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_what_eager_computes() -> None:
    assert run_on_ranks(by_inductor, 1, limit=280)[0] < 1e-5


def test_blocks_are_compiled_and_the_model_stays_as_it_was() -> None:
    model = Blocks().eval()
    names = list(model.state_dict())
    twin = compile.compile_regions(model, backend="eager")
    assert [compile.is_compiled_module(part) for part in twin.layers] == [True] * 3
    assert compile.is_compiled_module(twin.first)
    assert not compile.is_compiled_module(twin)
    assert (compile.has_compiled_regions(twin), compile.has_compiled_regions(model)) == (True, False)
    assert list(model.state_dict()) == names
    assert type(twin) is Blocks
    assert torch.equal(twin(torch.ones(2, 8)), model(torch.ones(2, 8)))
    assert twin.first.weight is model.first.weight
    assert extract_model_from_parallel(twin) is twin
    assert extract_model_from_parallel(twin, keep_torch_compile=False) is model
    assert extract_model_from_parallel(twin, recursive=True, keep_torch_compile=False) is model
    # and where they are
    before = model(torch.ones(2, 8))
    assert compile.compile_regions_in_place(model, backend="eager") is model
    assert torch.equal(model(torch.ones(2, 8)), before)
    assert all(layer._compiled_call_impl is not None for layer in model.layers)


def test_a_block_that_is_shared_and_a_part_with_two_names_or_none_are_in_the_twin() -> None:
    model = Blocks().eval()
    model.layers, model.norm = nn.ModuleList([model.layers[0]] * 3), model.first
    model.register_module("head", None)
    twin = compile.compile_regions(model, backend="eager")
    assert torch.equal(twin(torch.ones(2, 8)), model(torch.ones(2, 8)))
    assert (twin.norm is twin.first, twin.head) == (True, None)


def test_blocks_are_distinguished_from_other_lists() -> None:
    model = Blocks()
    assert (compile.has_repeated_blocks(model), compile.is_repeated_blocks(model.layers)) == (True, True)
    assert not compile.is_repeated_blocks(nn.ModuleList())
    assert not compile.is_repeated_blocks(nn.ModuleList([nn.Linear(1, 1), nn.ReLU()]))
    assert not compile.has_repeated_blocks(nn.Linear(1, 1))


def test_a_model_that_came_compiled_is_not_compiled_again() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    inner = nn.Linear(2, 2)
    compiled = torch.compile(inner, backend="eager")
    assert accelerator.prepare(compiled) is compiled
    assert list(accelerator.get_state_dict(compiled)) == ["weight", "bias"]
    accelerator.end_training()


def test_compiling_is_requested_once_by_a_backend_that_torch_has() -> None:
    with pytest.raises(ConfigurationError, match="Pass one of them"):
        Accelerator(cpu=True, dynamo_backend="eager", dynamo_plugin=compile.TorchDynamoPlugin())
    with pytest.raises(ConfigurationError, match="'fast' is not known"):
        Accelerator(cpu=True, dynamo_backend="fast")
    for gone in ("aot_torchxla_trace_once", "TORCHXLA_TRACE_ONCE"):
        with pytest.raises(ConfigurationError, match=f"{gone.lower()}.*Choose 'openxla'"):
            Accelerator(cpu=True, dynamo_backend=gone)


def plugin_settings(peer: Peer) -> list[Any]:
    import os

    plugin = peer.door("utils").TorchDynamoPlugin
    os.environ.update(ACCELERATE_DYNAMO_BACKEND="aot_eager", ACCELERATE_DYNAMO_MODE="reduce-overhead")
    os.environ.update(ACCELERATE_DYNAMO_USE_DYNAMIC="no", ACCELERATE_DYNAMO_USE_FULLGRAPH="yes")
    from_environment = plugin()
    explicit = plugin(backend="INDUCTOR", mode="default", dynamic=True, fullgraph=False, use_regional_compilation=True)
    plugins = (from_environment, explicit, plugin(options={"a": 1}, disable=True))
    accelerator = peer.Accelerator(cpu=True)
    state = accelerator.state.dynamo_plugin
    return [[item.to_dict(), item.to_kwargs(), str(item.backend)] for item in (*plugins, state)]


def test_a_plugin_reads_accelerates_variables() -> None:
    both = under_both(plugin_settings, 1)
    assert both.ours == both.theirs


def parts_compiled_by_hand(*names: str) -> Blocks:
    torch.manual_seed(0)
    model = Blocks()
    for name in names:
        parent, _, part = name.rpartition(".")
        setattr(model.get_submodule(parent), part, torch.compile(model.get_submodule(name), backend="eager"))
    return model


def saved_and_loaded(folder: str, kind: str) -> list[bool]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind) if kind else None
    accelerator, inputs = Accelerator(cpu=True, fsdp_plugin=plugin), torch.ones(4, 8)
    found: list[bool] = []
    # saved with parts compiled, and without
    for index, (saved, loaded) in enumerate(((("last", "layers.0"), ()), ((), ("last", "first")))):
        state, path = {}, f"{folder}/{index}"
        for is_first, names in ((True, saved), (False, loaded)):
            model = parts_compiled_by_hand(*names)
            model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
            if not is_first:
                accelerator.load_state(path)
                now = accelerator.get_state_dict(model)
                found.append(all(value.equal(now[name]) for name, value in state.items()))
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            if is_first:
                accelerator.save_state(path)
                accelerator.save_model(model, f"{path}/weights")
                state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
                accelerator.wait_for_everyone()
                written = load_file(f"{path}/weights/model.safetensors")
                found.append({*written} == {*Blocks().state_dict()})
                empty = parts_compiled_by_hand(*loaded)
                load_checkpoint_in_model(empty, f"{path}/weights", strict=True)
                found.append(empty.last.weight.equal(written["last.weight"]))
            accelerator.free_memory()
    return found


@pytest.mark.parametrize(
    "kind", ["", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"))]
)
def test_parts_that_were_compiled_by_hand_are_saved_under_plain_names(tmp_path: Path, kind: str) -> None:
    for found in run_on_ranks(saved_and_loaded, 2, str(tmp_path), kind):
        assert found == [True] * 6
