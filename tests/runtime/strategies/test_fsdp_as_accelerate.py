"""Sharded training beside Accelerate's own FSDP2 and HSDP: losses, norms, weights and files are equal, and each loads the other's."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from tests.peers import Both, Peer, say_that_ranks_have_devices, under_both

ROUNDING: dict[str, float] = {"rtol": 0, "atol": 1e-6}
FORMATS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


class Block(nn.Module):
    """A part with a norm, a weight that does not divide by two, and a buffer."""

    def __init__(self, width: int, persistent: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 5)
        self.outer = nn.Linear(5, width, bias=False)
        self.register_buffer("factor", torch.full((1,), 0.5), persistent=persistent)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + self.factor * self.outer(torch.tanh(self.inner(self.norm(inputs))))
        return outputs


class Net(nn.Module):
    """A model of two blocks, whose last weights are the first ones where they are tied."""

    def __init__(self, seed: int = 0, *, tied: bool = False, persistent: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList([Block(8, persistent), Block(8, persistent)])
        self.last = nn.Linear(8, 8, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        outputs: Tensor = self.last(hidden)
        return outputs


class Training:
    """A training with sharded weights under either package."""

    def __init__(
        self,
        peer: Peer,
        seed: int = 0,
        degrees: dict[str, int] | None = None,
        *,
        tied: bool = False,
        persistent: bool = True,
        **settings: Any,
    ) -> None:
        say_that_ranks_have_devices(peer)
        defaults = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
        plugin = peer.door("utils").FullyShardedDataParallelPlugin
        options: dict[str, Any] = {"fsdp_plugin": plugin(fsdp_version=2, **{**defaults, **settings})}
        if degrees is not None:
            options["parallelism_config"] = peer.door("parallelism_config").ParallelismConfig(**degrees)
        self.accelerator = peer.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        model = Net(seed, tied=tied, persistent=persistent)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(inputs, inputs.flip(1)), batch_size=8 // self.accelerator.num_processes)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def epoch(self) -> dict[str, list[float]]:
        losses, norms = [], []
        for inputs, targets in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.3)
                    norms.append(float(whole(norm)))
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(float(loss.detach()))
        return {"losses": losses, "norms": norms}

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(value) for name, value in self.accelerator.unwrap_model(self.model).state_dict().items()}

    def momenta(self) -> list[Tensor]:
        group = self.optimizer.param_groups[0]["params"]
        return [whole(self.optimizer.state[weight]["momentum_buffer"]) for weight in group]

    def use_format(self, name: str) -> None:
        plugin = self.accelerator.state.fsdp_plugin
        plugin.state_dict_config = plugin.optim_state_dict_config = None
        plugin.set_state_dict_type(name)

    def forget(self) -> None:
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.zero_()
                self.optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)


def whole(value: Any) -> Any:
    return value.full_tensor().clone() if isinstance(value, DTensor) else copy.deepcopy(value)


def trains(peer: Peer, folder: str, settings: dict[str, Any], degrees: dict[str, int] | None = None) -> Any:
    training = Training(peer, degrees=degrees, **settings)
    accelerator = training.accelerator
    numbers = training.epoch()
    found: dict[str, Any] = {"weights": training.weights(), "momenta": training.momenta()}
    for name in FORMATS:
        training.use_format(name)
        accelerator.save_state(f"{folder}/{peer.name}/{name}")
        accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(training.model)
    accelerator.save_model(training.model, f"{folder}/{peer.name}/model")
    accelerator.wait_for_everyone()
    after = training.epoch()
    return {
        **found,
        "state": {name: whole(value) for name, value in state.items()},
        "class": [cls.__name__ for cls in type(accelerator.unwrap_model(training.model)).__mro__][:2],
        "type": accelerator.distributed_type.value,
        "numbers": [numbers, after],
        "end": training.weights(),
    }


def calls_hooks(peer: Peer, folder: str) -> Any:
    """What hooks of a save and of a load get, and a merge of the parts."""
    training = Training(peer)
    accelerator, calls = training.accelerator, []

    def at_save(models: Any, weights: Any, path: Any) -> None:
        calls.append(("save", len(models), models[0] is training.model, list(weights)))

    def at_load(models: Any, path: Any) -> None:
        calls.append(("load", len(models), str(path) == f"{folder}/{peer.name}"))

    handles = [accelerator.register_save_state_pre_hook(at_save), accelerator.register_load_state_pre_hook(at_load)]
    for _ in range(2):
        accelerator.save_state(f"{folder}/{peer.name}")
        accelerator.wait_for_everyone()
        accelerator.load_state(f"{folder}/{peer.name}")
        for handle in handles:
            handle.remove()
    return calls


def merges(peer: Peer, folder: str) -> Any:
    from safetensors.torch import load_file

    found = []
    for name in ("accelerate", "accelerate_nb"):
        target = f"{folder}/merged_{name}_by_{peer.name}"
        peer.door("utils").merge_fsdp_weights(f"{folder}/{name}/pytorch_model_fsdp_0", target)
        found.append(load_file(f"{target}/model.safetensors"))
    return found


def reads_the_others(peer: Peer, folder: str, settings: dict[str, Any], degrees: dict[str, int] | None = None) -> Any:
    other = "accelerate" if peer.is_ours else "accelerate_nb"
    training = Training(peer, 1, degrees, **settings)
    training.epoch()
    found = []
    for name in FORMATS:
        training.forget()
        training.use_format(name)
        training.accelerator.load_state(f"{folder}/{other}/{name}")
        found.append((training.weights(), training.momenta()))
    return {"found": found, "after": training.epoch(), "end": training.weights()}


def writes_by_functions(peer: Peer, folder: str) -> Any:
    """The functions that other libraries call, with files of torch's format and files of single processes."""
    training = Training(peer)
    training.epoch()
    accelerator, plugin, utils = training.accelerator, training.accelerator.state.fsdp_plugin, peer.door("utils")
    training.use_format("SHARDED_STATE_DICT")
    for use_dcp in (True, False):
        target = f"{folder}/{peer.name}/{use_dcp}"
        utils.save_fsdp_model(plugin, accelerator, training.model, target, use_dcp=use_dcp)
        utils.save_fsdp_optimizer(plugin, accelerator, training.optimizer, training.model, target, use_dcp=use_dcp)
    accelerator.wait_for_everyone()
    return training.weights(), training.momenta()


def reads_by_functions(peer: Peer, folder: str) -> Any:
    training = Training(peer, 1)
    training.epoch()
    accelerator, plugin, utils = training.accelerator, training.accelerator.state.fsdp_plugin, peer.door("utils")
    training.use_format("SHARDED_STATE_DICT")
    # theirs takes no file of a process whose mesh has other names than its own
    sources = [("accelerate", True), ("accelerate", False), ("accelerate_nb", False)]
    found = {}
    for other, use_dcp in sources if peer.is_ours else [("accelerate_nb", True)]:
        training.forget()
        source = f"{folder}/{other}/{use_dcp}"
        utils.load_fsdp_model(plugin, accelerator, training.model, source, use_dcp=use_dcp)
        utils.load_fsdp_optimizer(plugin, accelerator, training.optimizer, training.model, source, use_dcp=use_dcp)
        found[other, use_dcp] = (training.weights(), training.momenta())
    return found


def reads_its_type_of_all_weights(peer: Peer, folder: str) -> Any:
    """Of a folder with both types, one written before the other; the model has buffers, and no adapter."""
    training = Training(peer)
    accelerator, plugin, utils = training.accelerator, training.accelerator.state.fsdp_plugin, peer.door("utils")
    model, optimizer, target, found = training.model, training.optimizer, f"{folder}/{peer.name}", []
    saved = []
    for name in FORMATS:
        training.epoch()
        training.use_format(name)
        saved.append((training.weights(), training.momenta()))
        utils.save_fsdp_model(plugin, accelerator, model, target, adapter_only=True)
        utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, target)
        accelerator.wait_for_everyone()
    for name in FORMATS:
        training.forget()
        training.use_format(name)
        result = utils.load_fsdp_model(plugin, accelerator, model, target, adapter_only=True)
        utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, target, adapter_only=True)
        found.append((training.weights(), training.momenta()))
    return saved, found, result


def files(folder: Path) -> set[str]:
    """The files below a folder, without what this package has besides."""
    others = ("checkpoint.json", "positions_")
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(others)
    }


def keys(folder: Path) -> dict[str, Any]:
    """The keys of all files of a checkpoint, in parts and complete, with sizes."""
    from torch.distributed.checkpoint import FileSystemReader

    found: dict[str, Any] = {}
    for listed in folder.rglob(".metadata"):
        content = FileSystemReader(listed.parent).read_metadata().state_dict_metadata
        found[listed.parent.name] = {key: tuple(getattr(item, "size", ())) for key, item in content.items()}
    for path in folder.glob("*.bin"):
        if "random" not in path.name:
            found[path.name] = _keys_of(torch.load(path, weights_only=True))
    return found


def _keys_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _keys_of(item) for key, item in value.items()}
    return tuple(value.shape) if isinstance(value, Tensor) else value


def compare(both: Both, folder: Path) -> None:
    for ours, theirs in zip(both.ours, both.theirs, strict=True):
        for name in ("numbers", "weights", "momenta", "end"):
            torch.testing.assert_close(ours[name], theirs[name], **ROUNDING)
        assert ours["type"] == theirs["type"]
        assert ours["class"] == theirs["class"]
    torch.testing.assert_close(both.ours[0]["state"], both.theirs[0]["state"], **ROUNDING)
    for name in (*FORMATS, "model"):
        assert files(folder / "accelerate_nb" / name) == files(folder / "accelerate" / name)
        assert keys(folder / "accelerate_nb" / name) == keys(folder / "accelerate" / name)


def compare_read(written: Both, read: Both) -> None:
    for source, target in ((written.ours, read.theirs), (written.theirs, read.ours)):
        for saved, loaded in zip(source, target, strict=True):
            for found in loaded["found"]:
                torch.testing.assert_close(found, (saved["weights"], saved["momenta"]), rtol=0, atol=0)
            torch.testing.assert_close(loaded["after"], saved["numbers"][1], **ROUNDING)
            torch.testing.assert_close(loaded["end"], saved["end"], **ROUNDING)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"reshard_after_forward": False}, marks=pytest.mark.slow),
        pytest.param({"auto_wrap_policy": None, "transformer_cls_names_to_wrap": None}, marks=pytest.mark.slow),
        # theirs takes no buffers that are saved here
        pytest.param({"cpu_ram_efficient_loading": True, "persistent": False}, marks=pytest.mark.slow),
        pytest.param({"activation_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"tied": True}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: ",".join(settings) or "blocks",
)
def test_trainings_and_files_are_equal_and_each_loads_the_others(tmp_path: Path, settings: dict[str, Any]) -> None:
    written = under_both(trains, 2, str(tmp_path), settings)
    compare(written, tmp_path)
    compare_read(written, under_both(reads_the_others, 2, str(tmp_path), settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees", [{"dp_shard_size": 4}, {"dp_replicate_size": 2, "dp_shard_size": 2}], ids=["FSDP", "HSDP"]
)
def test_shards_and_copies_on_four_ranks_are_equal(tmp_path: Path, degrees: dict[str, int]) -> None:
    written = under_both(trains, 4, str(tmp_path), {}, degrees)
    compare(written, tmp_path)
    compare_read(written, under_both(reads_the_others, 4, str(tmp_path), {}, degrees))


def test_hooks_get_the_same_and_either_merges_the_parts_of_both(tmp_path: Path) -> None:
    calls = under_both(calls_hooks, 2, str(tmp_path))
    assert calls.ours == calls.theirs
    assert [call[0] for call in calls.ours[0]] == ["save", "load"]
    merged = under_both(merges, 1, str(tmp_path))
    wanted = dict(Net().state_dict())
    for weights in (*merged.ours[0], *merged.theirs[0]):
        torch.testing.assert_close(weights, wanted, rtol=0, atol=0)


def test_functions_of_other_libraries_write_the_same_and_read_each_other(tmp_path: Path) -> None:
    written = under_both(writes_by_functions, 2, str(tmp_path))
    assert files(tmp_path / "accelerate_nb") == files(tmp_path / "accelerate")
    assert (tmp_path / "accelerate_nb" / "False" / "pytorch_model_fsdp_0_rank1.bin").is_file()
    read = under_both(reads_by_functions, 2, str(tmp_path))
    for rank in range(2):
        saved = {"accelerate_nb": written.ours[rank], "accelerate": written.theirs[rank]}
        for (other, _), found in (*read.ours[rank].items(), *read.theirs[rank].items()):
            torch.testing.assert_close(found, saved[other], rtol=0, atol=0)


def test_functions_read_the_type_of_the_plugin_and_have_all_weights_of_a_model_without_adapters(tmp_path: Path) -> None:
    both = under_both(reads_its_type_of_all_weights, 2, str(tmp_path))
    for ours, theirs in zip(both.ours, both.theirs, strict=True):
        for saved, found, result in (ours, theirs):
            torch.testing.assert_close(found, saved, rtol=0, atol=0)
            assert result == ours[2]
            assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert keys(tmp_path / "accelerate_nb") == keys(tmp_path / "accelerate")
