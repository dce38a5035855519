"""Checkpoints of either side are loaded by the other, whole or named for what is wrong with them."""

import json
import os
import pickle
import time
from itertools import product
from pathlib import Path

import accelerate
import accelerate.utils.modeling as theirs
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accelerate_nb
import accelerate_nb.utils.modeling as ours
from accelerate_nb.errors import CheckpointError, ConfigurationError
from tests.big_models.models import Deep, Small, Tied, differences, empty, gpt2, seeded
from tests.runtime.checkpoints.test_damage import Evil

BOTH = [pytest.param(theirs, id="accelerate"), pytest.param(ours, id="accelerate_nb")]
SHARD = {"deep": 2500, "tied": 300}  # bytes, which makes two or three files
MAKE = {"deep": lambda seed: seeded(Deep, seed=seed), "tied": lambda seed: seeded(Tied, seed=seed)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders that each side wrote: whole and in shards, of both kinds."""
    folder = tmp_path_factory.mktemp("saved")
    for package, name, size, safe in product((accelerate, accelerate_nb), MAKE, ("10GB", "shards"), (True, False)):
        path = folder / f"{package.__name__}-{name}-{size}-{safe}"
        limit = size if size == "10GB" else SHARD[name]
        package.Accelerator(cpu=True).save_model(MAKE[name](1), path, max_shard_size=limit, safe_serialization=safe)
    return folder


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize("name", MAKE)
def test_checkpoints_of_both_sides_are_loaded(package, name, saved, tmp_path):
    wanted = MAKE[name](1)
    folders = sorted(path for path in saved.iterdir() if f"-{name}-" in path.name)
    assert len(folders) == 8
    for number, folder in enumerate(folders):
        if package is theirs and folder.name.startswith("accelerate-"):
            continue  # its own
        sharded = [item for item in os.listdir(folder) if item.endswith(".index.json")]
        assert bool(sharded) == ("shards" in folder.name)
        path = folder / sharded[0] if sharded and number % 2 else folder
        for device_map in (None, {"": "cpu"}):
            model = MAKE[name](2)
            package.load_checkpoint_in_model(model, path, device_map=device_map)
            assert differences(model, wanted) == [], (folder, device_map)
            assert sorted(package.find_tied_parameters(model)) == sorted(package.find_tied_parameters(wanted))
        model = empty(type(wanted))
        tops = dict.fromkeys(name.split(".")[0] for name in wanted.state_dict())
        parts = {part: "disk" if part in ("body", "inner") else "cpu" for part in tops}
        package.load_checkpoint_in_model(model, path, parts, offload_folder=tmp_path / f"{number}")
        accelerate_nb.dispatch_model(model, parts, offload_dir=tmp_path / f"{number}")
        assert differences(ours.get_state_dict_offloaded_model(model), wanted) == [], folder


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize("device_map", ["auto", "balanced", "balanced_low_0", "sequential", {"": "cpu"}, None])
def test_a_checkpoint_is_loaded_and_dispatched(package, device_map, saved, tmp_path):
    model = (accelerate_nb if package is ours else accelerate).load_checkpoint_and_dispatch(
        empty(Deep), saved / "accelerate-deep-shards-True", device_map, offload_folder=tmp_path,
        no_split_module_classes=["Block"], max_memory={"cpu": "1MB"},
    )  # fmt: skip
    x = torch.ones(2, 8)
    assert torch.equal(model(x), MAKE["deep"](1)(x))


def test_parts_that_a_small_memory_leaves_go_to_disk(saved, tmp_path):
    path = saved / "accelerate_nb-deep-shards-False"
    options = {"max_memory": {"cpu": 4000}, "offload_folder": tmp_path}
    model = accelerate_nb.load_checkpoint_and_dispatch(empty(Deep), path, "auto", **options)
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(model(torch.ones(2, 8)), MAKE["deep"](1)(torch.ones(2, 8)))


def test_tied_weights_on_disk_need_one_entry(tmp_path):
    plain, words = gpt2(), torch.tensor([[1, 2, 3]])
    accelerate_nb.Accelerator(cpu=True).save_model(plain, tmp_path / "w")
    model = empty(type(plain), plain.config)
    model.tie_weights()
    model = accelerate_nb.load_checkpoint_and_dispatch(
        model, tmp_path / "w", {"transformer": "disk", "lm_head": "disk"}, offload_folder=tmp_path / "off"
    )
    with torch.no_grad():
        assert torch.equal(model(words).logits, plain(words).logits)


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize("dtype", [torch.float16, "bfloat16", torch.float64])
def test_weights_are_converted_as_accelerate_does(package, dtype, saved):
    model = seeded(Deep)
    package.load_checkpoint_in_model(model, saved / "accelerate-deep-10GB-True", {"": "cpu"}, dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    expected = MAKE["deep"](1).to(wanted)
    assert differences(model, expected) == []


@pytest.mark.parametrize("package", BOTH)
def test_some_modules_can_stay_in_float32_and_a_checkpoint_is_loaded_in_place(package, saved):
    model, options = seeded(Deep), {"dtype": "float16", "keep_in_fp32_modules": ["head"]}
    package.load_checkpoint_in_model(model, saved / "accelerate-deep-10GB-True", {"": "cpu"}, **options)
    assert (model.head.weight.dtype, model.gain.dtype) == (torch.float32, torch.float16)
    # an optimizer that was made before still has the model's parameters
    model = seeded(Deep)
    parameter = model.head.weight
    package.load_checkpoint_in_model(model, saved / "accelerate-deep-shards-True")
    assert model.head.weight is parameter


def test_weights_on_disk_have_the_type_that_was_requested(saved, tmp_path):
    for dtype, wanted in (("float16", torch.float16), (None, torch.float32)):
        path, folder = saved / "accelerate-deep-10GB-True", tmp_path / str(dtype)
        load = accelerate_nb.load_checkpoint_and_dispatch
        model = load(empty(Deep), path, {"": "disk"}, offload_folder=folder, dtype=dtype)
        index = json.loads((folder / "index.json").read_text())
        assert {entry["dtype"] for entry in index.values()} == {str(wanted).removeprefix("torch.")}
        assert model(torch.ones(1, 8).to(wanted)).dtype == wanted


def test_a_type_is_taken_without_a_device_map_too_and_shards_can_be_loaded_strictly(saved):
    model = seeded(Deep)  # Accelerate leaves the argument out
    ours.load_checkpoint_in_model(model, saved / "accelerate-deep-10GB-True", dtype=torch.float16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    model = seeded(Deep)  # Accelerate takes each shard for the whole checkpoint
    ours.load_checkpoint_in_model(model, saved / "accelerate-deep-shards-True", strict=True)
    assert differences(model, MAKE["deep"](1)) == []


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_strict_loading_names_what_differs_and_changes_nothing(device_map, tmp_path):
    state = seeded(Small, seed=1).state_dict()
    del state["linear2.bias"]
    torch.save({**state, "linear3.bias": torch.ones(1)}, tmp_path / "w.bin")
    model = seeded(Small)
    with pytest.raises(CheckpointError, match=r"\['linear3\.bias'\]; missing names: \['linear2\.bias'\]"):
        ours.load_checkpoint_in_model(model, tmp_path / "w.bin", device_map, strict=True)
    assert differences(model, seeded(Small)) == []
    ours.load_checkpoint_in_model(model, tmp_path / "w.bin", device_map)
    assert set(differences(model, seeded(Small, seed=1))) == {"linear2.bias"}


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_unexpected_names_are_reported(package, device_map, tmp_path, caplog):
    torch.save({**seeded(Small).state_dict(), "other": torch.ones(1)}, tmp_path / "w.bin")
    package.load_checkpoint_in_model(seeded(Small), str(tmp_path / "w.bin"), device_map)
    assert "were not used when" in caplog.text
    assert "other" in caplog.text


def test_weights_that_stay_empty_are_reported(tmp_path, caplog):
    save_file({"linear1.weight": torch.ones(4, 3)}, tmp_path / "w.safetensors")
    model = empty(Small)
    ours.load_checkpoint_in_model(model, tmp_path / "w.safetensors")
    assert "has no weights for batchnorm.bias" in caplog.text
    assert "stay on the meta device" in caplog.text


def test_buffers_of_parts_on_disk_are_loaded(tmp_path):
    plain = seeded(Small)
    plain.batchnorm.running_mean += 3
    torch.save(plain.state_dict(), tmp_path / "w.bin")
    load, folder = accelerate_nb.load_checkpoint_and_dispatch, tmp_path / "off"
    model = load(empty(Small), tmp_path / "w.bin", {"": "disk"}, offload_folder=folder)
    assert torch.equal(model(torch.ones(1, 3)), plain(torch.ones(1, 3)))  # Accelerate leaves them as they were made


STATE, TOO_LARGE = seeded(Small).state_dict(), {"linear1.weight": torch.ones(9, 9)}
NESTED = {"state_dict": STATE, "epoch": 3}
IS_DAMAGED = r"w\.bin should hold a state dict written by torch\.save, but is damaged"
IS_FOREIGN = r"w\.safetensors was saved with the format 'tf'"
IS_NO_SAFETENSORS = r"w\.safetensors should be a safetensors file, but is damaged"
PICKLED_CODE = pickle.dumps(Evil(Path("executed")))
# Each damage: the file, what is done to it, and the error.
DAMAGES = {
    "cut": ("w.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-40]), IS_NO_SAFETENSORS),
    "text": ("w.safetensors", lambda path: path.write_text("<html>not found</html>"), IS_NO_SAFETENSORS),
    "foreign": ("w.safetensors", lambda path: save_file(STATE, path, {"format": "tf"}), IS_FOREIGN),
    "other": ("w.safetensors", lambda path: save_file(TOO_LARGE, path), "doesn't fit this model"),
    "cut-bin": ("w.bin", lambda path: path.write_bytes(path.read_bytes()[:-40]), IS_DAMAGED),
    "empty-bin": ("w.bin", lambda path: path.write_bytes(b""), IS_DAMAGED),
    "text-bin": ("w.bin", lambda path: path.write_text("version https://git-lfs.github.com/spec/v1"), IS_DAMAGED),
    "code": ("w.bin", lambda path: torch.save({"linear1.weight": Evil(Path("executed"))}, path), "could run code"),
    "code-pickle": ("w.bin", lambda path: path.write_bytes(PICKLED_CODE), "could run code"),
    "nested": ("w.bin", lambda path: torch.save(NESTED, path), r"holds a mapping of \['state_dict', 'epoch'\]"),
    "list": ("w.bin", lambda path: torch.save([torch.ones(1)], path), "holds a list"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_a_damaged_or_foreign_file_is_named(damage, device_map, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, damaged, message = DAMAGES[damage]
    (save_file if "safe" in name else torch.save)(STATE, tmp_path / name)
    damaged(tmp_path / name)
    with pytest.raises(CheckpointError, match=message):
        ours.load_checkpoint_in_model(seeded(Small), str(tmp_path / name), device_map)
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_that_is_not_there_is_reported(tmp_path):
    def is_refused(message, *arguments, error=ConfigurationError, **options):
        with pytest.raises(error, match=message):
            ours.load_checkpoint_in_model(seeded(Small), *arguments, **options)

    is_refused("should be the path to a file", tmp_path / "none")
    is_refused(r"is not a folder containing a `\.index\.json` file.* It holds: nothing", tmp_path)
    (tmp_path / "full").mkdir()
    for number in range(12):
        (tmp_path / "full" / f"{number:02}.txt").touch()
    is_refused(r"It holds: 00\.txt, .*, 09\.txt, 2 more\.", tmp_path / "full")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    is_refused(r"not beside it: gone\.safetensors", tmp_path, error=CheckpointError)
    (tmp_path / "model.safetensors.index.json").write_text("[1]")
    is_refused("should be an index", tmp_path, error=CheckpointError)
    for name in ("a", "b"):
        (tmp_path / f"{name}.index.json").write_text("{}")
    is_refused("more than one", tmp_path)
    is_refused("please pass along an `offload_folder`", __file__, {"": "disk"})
    is_refused("8 bits", __file__, offload_8bit_bnb=True, error=NotImplementedError)
    with pytest.raises(ValueError, match="please choose 'auto'"):
        accelerate_nb.load_checkpoint_and_dispatch(seeded(Small), __file__, "everywhere")


@pytest.mark.parametrize("newer", ["whole", "shards"])
def test_of_several_checkpoints_in_a_folder_the_newest_is_loaded(newer, tmp_path):
    """What an older save of another size left behind; Accelerate's own `save_model` leaves it."""
    old, new = seeded(Small, seed=1), seeded(Small, seed=2)
    accelerate_nb.Accelerator(cpu=True).save_model(new, tmp_path, max_shard_size=40 if newer == "shards" else "1GB")
    side = tmp_path / "side"
    accelerate_nb.Accelerator(cpu=True).save_model(old, side, max_shard_size="1GB" if newer == "shards" else 40)
    past = time.time() - 60
    for path in side.iterdir():
        if not (tmp_path / path.name).exists():
            os.utime(path, (past, past))
            path.rename(tmp_path / path.name)
    model = seeded(Small)
    ours.load_checkpoint_in_model(model, tmp_path)
    assert differences(model, new) == []


def test_a_file_may_be_written_anew_under_a_loaded_model(tmp_path):
    """Weights are no part of the file's memory: a shorter file in its place would crash the process."""
    for name in ("w.safetensors", "w.bin"):
        wanted = seeded(Small, seed=1)
        (save_file if "safe" in name else torch.save)(wanted.state_dict(), tmp_path / name)
        models = [empty(Small), empty(Small)]
        ours.load_checkpoint_in_model(models[0], tmp_path / name)
        ours.load_checkpoint_in_model(models[1], tmp_path / name, {"": "cpu"})
        with (tmp_path / name).open("r+b") as file:
            file.truncate(10)
        assert [differences(model, wanted) for model in models] == [[], []]


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"linear1": "cpu", "linear2": "disk"}])
def test_a_file_is_read_as_accelerate_reads_it(device_map, tmp_path):
    state = seeded(Small).state_dict()
    save_file(state, tmp_path / "w.safetensors", metadata={"format": "pt"})
    torch.save(state, tmp_path / "w.bin")
    torch.save(state, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for name in ("w.safetensors", "w.bin", "old.bin"):
        path = str(tmp_path / name)
        found, wanted = ours.load_state_dict(path, device_map), theirs.load_state_dict(path, device_map)
        assert set(found) == set(wanted)
        assert all(torch.equal(found[item], wanted[item]) for item in wanted)


@pytest.mark.parametrize("package", BOTH)
def test_a_tensor_is_put_and_converted(package):
    layer = nn.Linear(2, 3)
    layer.register_buffer("seen", torch.zeros(2))
    model = nn.Sequential(layer)
    put = package.set_module_tensor_to_device
    kept = layer.weight
    put(model, "0.weight", "cpu")
    assert layer.weight is kept
    put(model, "0.weight", "meta")
    assert layer.weight.is_meta
    with pytest.raises(ValueError, match="is on the meta device"):
        put(model, "0.weight", "cpu")
    value = torch.ones(3, 2, dtype=torch.float64)
    put(model, "0.weight", "cpu", value=value)
    assert layer.weight.dtype == torch.float32
    put(model, "0.weight", "cpu", value=value, dtype=torch.float16)
    assert layer.weight.dtype == torch.float16
    assert isinstance(layer.weight, nn.Parameter)
    put(model, "0.seen", "cpu", value=torch.ones(2))
    assert torch.equal(layer.seen, torch.ones(2))
    assert isinstance(layer._buffers["seen"], torch.Tensor)
    put(model, "0.weight", "meta", dtype=torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    layer.weight.requires_grad_(False)
    put(model, "0.weight", "cpu", value=value)
    assert not layer.weight.requires_grad
    for name, shape in (("0.weight", (2, 2)), ("0.nothing", (1,)), ("1.weight", (1,))):
        with pytest.raises((ValueError, AttributeError)):
            put(model, name, "cpu", value=torch.ones(shape))


def test_tied_weights_are_put_on_a_device_once():
    weight = torch.ones(2, 2)
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    tied = {weight.data_ptr(): {}}
    for layer in (a, b):
        ours.set_module_tensor_to_device(layer, "weight", "cpu", value=weight, tied_params_map=tied)
    assert a.weight is b.weight
    assert ours.find_tied_parameters(nn.ModuleList([a, b])) == [["0.weight", "1.weight"]]


@pytest.mark.parametrize("recurse", [False, True])
@pytest.mark.parametrize("buffers", [False, True])
def test_tensors_of_a_module_are_those_of_accelerate(recurse, buffers):
    model = seeded(Deep)
    names = [[name for name, _ in package.named_module_tensors(model, buffers, recurse)] for package in (ours, theirs)]
    assert names[0] == names[1]
    kept = [name for name, _ in ours.named_module_tensors(model, True, recurse, remove_non_persistent=True)]
    assert "step" not in kept
    assert "mask" in kept
    assert ours.get_non_persistent_buffers(model, recurse) == theirs.get_non_persistent_buffers(model, recurse)
    assert ours.id_tensor_storage(model.gain) == theirs.id_tensor_storage(model.gain)
    assert ours.id_tensor_storage(model.gain[2:]) == ours.id_tensor_storage(model.gain)
