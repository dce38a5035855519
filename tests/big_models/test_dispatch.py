"""Models whose weights lie elsewhere give the numbers of the plain model."""

import copy
import os
import warnings

import accelerate
import pytest
import torch
from accelerate.utils import offload as theirs
from safetensors.torch import save_file
from torch import nn

import accelerate_nb
import accelerate_nb.utils.modeling as our_modeling
from accelerate_nb.errors import CheckpointError, ConfigurationError
from accelerate_nb.hooks import remove_hook_from_submodules
from accelerate_nb.utils import BnbQuantizationConfig, has_4bit_bnb_layers, load_and_quantize_model, offload as ours
from tests.big_models.models import Deep, Small, Tied, bert, differences, empty, gpt2, seeded

BOTH = [pytest.param(accelerate, id="accelerate"), pytest.param(accelerate_nb, id="accelerate_nb")]
WORDS = torch.tensor([[1, 5, 3, 2]])

MAPS = {
    "deep-disk": (lambda: seeded(Deep), torch.ones(2, 8), {"": "disk"}),
    "deep-mixed": (
        lambda: seeded(Deep),
        torch.ones(2, 8),
        {"gain": "cpu", "mask": "cpu", "body.0": "disk", "body.1.0": "cpu", "body.1.1": "disk", "head": "cpu"},
    ),
    "small": (lambda: seeded(Small), torch.ones(2, 3), {"linear1": "disk", "batchnorm": "disk", "linear2": "cpu"}),
    "tied-disk": (lambda: seeded(Tied), WORDS, {"embed": "disk", "inner": "cpu", "head": "disk"}),
    "tied-split": (lambda: seeded(Tied), WORDS, {"embed": "cpu", "inner": "disk", "head": "disk"}),
    "gpt2": (gpt2, WORDS, {"transformer": "disk", "lm_head": "disk"}),
    "gpt2-mixed": (
        gpt2,
        WORDS,
        {"transformer.wte": "cpu", "lm_head": "cpu", "transformer.wpe": "cpu", "transformer.drop": "cpu",
         "transformer.h.0": "disk", "transformer.h.1": "cpu", "transformer.h.2": "disk", "transformer.ln_f": "disk"},
    ),
    "bert": (bert, WORDS, {"bert.embeddings": "cpu", "bert.encoder": "disk", "cls": "cpu"}),
}  # fmt: skip


def run(model, inputs):
    with torch.no_grad():
        output = model(inputs)
    return getattr(output, "logits", output)


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize("case", MAPS)
@pytest.mark.parametrize("buffers", [False, True])
def test_a_dispatched_model_is_the_plain_model(package, case, buffers, tmp_path):
    make, inputs, device_map = MAPS[case]
    if package is accelerate and "" in device_map:
        pytest.skip("Accelerate writes nothing for the empty name")
    plain, model = make(), make()
    package.dispatch_model(model, device_map, offload_dir=tmp_path, offload_buffers=buffers)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(run(model, inputs), run(plain, inputs))
    assert torch.equal(run(model, inputs), run(plain, inputs))
    assert model.hf_device_map == device_map
    with pytest.raises(RuntimeError, match="can't move a model"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.to("cpu")


@pytest.mark.parametrize("case", MAPS)
@pytest.mark.parametrize("buffers", [False, True])
def test_a_dispatched_model_has_all_of_its_state_and_without_hooks_is_the_plain_one_again(case, buffers, tmp_path):
    make, inputs, device_map = MAPS[case]
    plain, model = make(), make()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    accelerate_nb.dispatch_model(model, device_map, offload_dir=tmp_path, offload_buffers=buffers)
    state, wanted = our_modeling.get_state_dict_offloaded_model(model), plain.state_dict()
    assert list(state) == list(wanted)
    assert differences(state, plain) == []
    for name in ("head.weight", "lm_head.weight", "linear1.weight"):
        if name in state:
            module = model.get_submodule(name.rpartition(".")[0])
            filled = our_modeling.get_state_dict_from_offload(module, name, {name: ""})
            assert torch.equal(filled[name], wanted[name])
    run(model, inputs)
    remove_hook_from_submodules(model)
    assert torch.equal(run(model, inputs), run(plain, inputs))
    assert sorted(our_modeling.find_tied_parameters(model)) == sorted(our_modeling.find_tied_parameters(plain))
    del model.hf_device_map
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    model.to("cpu")


@pytest.mark.parametrize("package", BOTH)
@pytest.mark.parametrize(
    "make", [lambda: seeded(Deep), lambda: seeded(Tied), gpt2, bert], ids=["deep", "tied", "gpt2", "bert"]
)
def test_offloaded_models_are_the_plain_ones(package, make, tmp_path):
    plain, inputs = make(), torch.ones(2, 8) if hasattr(make(), "gain") else WORDS
    wanted = run(plain, inputs)
    on_cpu = package.cpu_offload(make(), execution_device="cpu")
    assert all(parameter.is_meta for parameter in on_cpu.parameters())
    assert torch.equal(run(on_cpu, inputs), wanted)
    on_disk = package.disk_offload(make(), tmp_path / "all", offload_buffers=True)
    assert torch.equal(run(on_disk, inputs), wanted)
    model, hook = package.cpu_offload_with_hook(make(), "cpu")
    assert torch.equal(run(model, inputs), wanted)
    hook.remove()


def test_each_side_runs_what_the_other_wrote_to_disk(tmp_path):
    plain, x = seeded(Deep), torch.ones(2, 8)
    accelerate.disk_offload(seeded(Deep), tmp_path / "theirs")
    accelerate_nb.disk_offload(seeded(Deep), tmp_path / "ours")
    for package, folder in ((accelerate_nb, "theirs"), (accelerate, "ours")):
        model = package.disk_offload(empty(Deep), tmp_path / folder, execution_device="cpu")
        assert torch.equal(run(model, x), run(plain, x))


def test_a_model_that_was_trained_since_runs_with_its_new_weights(tmp_path):
    model, x = seeded(Small), torch.ones(2, 3)
    accelerate_nb.disk_offload(copy.deepcopy(model), tmp_path)
    with torch.no_grad():
        model.linear2.bias += 1
    wanted = run(model, x)
    assert torch.equal(run(accelerate_nb.disk_offload(model, tmp_path), x), wanted)  # Accelerate: the old ones


def test_a_folder_without_the_weights_is_an_error_that_names_them(tmp_path):
    accelerate_nb.disk_offload(seeded(Small), tmp_path)
    model, small = empty(Deep), empty(Small)
    with pytest.raises(CheckpointError, match=r"none for gain, .*head\.bias"):
        accelerate_nb.disk_offload(model, tmp_path, execution_device="cpu")
    with pytest.raises(CheckpointError, match="is no folder of offloaded weights"):
        accelerate_nb.disk_offload(small, tmp_path / "none", execution_device="cpu")
    (tmp_path / "linear1.weight.dat").write_bytes(b"1234")
    accelerate_nb.disk_offload(small, tmp_path, execution_device="cpu")
    message = r"linear1\.weight\.dat should hold a tensor \[4, 3\] .*48 bytes.* has 4 bytes"
    with pytest.raises(CheckpointError, match=message):
        small(torch.ones(1, 3))


@pytest.mark.parametrize("package", BOTH)
def test_one_device_just_moves_the_model(package):
    model = package.dispatch_model(seeded(Small), {"": "cpu"})
    assert not hasattr(model, "_hf_hook")
    assert model.hf_device_map == {"": "cpu"}
    quantized = seeded(Small)  # by no bitsandbytes that can move it
    quantized.is_loaded_in_8bit, quantized.to = True, None
    forced = package.dispatch_model(seeded(Small), {"": "cpu"}, force_hooks=True)
    for model in (forced, package.dispatch_model(quantized, {"": "cpu"})):
        assert hasattr(model, "_hf_hook")
        assert torch.equal(run(model, torch.ones(1, 3)), run(seeded(Small), torch.ones(1, 3)))


def test_hooks_of_a_dispatched_model_stand_where_accelerate_puts_them(tmp_path):
    found = []
    for item in (accelerate, accelerate_nb):
        device_map = {"gain": "meta", "mask": "meta", "body.0": "cpu", "body.1": "disk", "head": "meta"}
        model, options = seeded(Deep), {"main_device": "meta", "skip_keys": ["extra"]}
        item.dispatch_model(model, device_map, offload_dir=tmp_path / item.__name__, **options)
        found.append({name: repr(getattr(module, "_hf_hook", None)) for name, module in model.named_modules()})
    assert found[0] == found[1]


def test_a_deep_copy_of_a_dispatched_model_is_a_model_of_its_own(tmp_path):
    model, x = seeded(Deep), torch.ones(2, 8)
    device_map = {"gain": "cpu", "mask": "cpu", "body": "disk", "head": "cpu"}
    accelerate_nb.dispatch_model(model, device_map, offload_dir=tmp_path)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.head.bias += 1
    assert torch.allclose(run(twin, x), run(model, x) + 1)
    remove_hook_from_submodules(model)
    with pytest.raises(RuntimeError), pytest.warns(UserWarning, match="shouldn't move"):
        twin.to("cpu")
    model.to("cpu")


def test_a_split_modules_own_tensors_are_minded(tmp_path):
    model, x = seeded(Deep), torch.ones(2, 8)
    parts = {"gain": "cpu", "mask": "cpu", "body.1": "cpu", "head": "cpu"}
    block = {f"body.0.{index}.{part}": "disk" for index in (0, 1) for part in ("scale", "shift", "up")}
    rest = {f"body.0.{index}.down": "cpu" for index in (0, 1)}
    torch.save(model.state_dict(), tmp_path / "w.bin")
    load, device_map = accelerate_nb.load_checkpoint_and_dispatch, {**parts, **block, **rest}
    loaded = load(empty(Deep), tmp_path / "w.bin", device_map, offload_folder=tmp_path / "off")
    assert loaded.body[0][0].scale.is_meta
    assert torch.equal(run(loaded, x), run(model, x))


def test_what_a_map_lacks_is_reported(tmp_path):
    model = seeded(Small)
    with pytest.raises(ConfigurationError, match="Add their modules to it: 'linear1', 'batchnorm'"):
        accelerate_nb.dispatch_model(model, {"linear2": "cpu"})
    with pytest.raises(ConfigurationError, match="no available device for 'linear2': 'gpu'"):
        accelerate_nb.dispatch_model(model, {"": "cpu", "linear2": "gpu"})
    with pytest.raises(ValueError, match=r"Pass `offload_dir`; .* need to be offloaded: linear1, batchnorm"):
        accelerate_nb.dispatch_model(model, {"linear1": "disk", "batchnorm": "disk", "linear2": "cpu"})


@pytest.mark.skipif(torch.accelerator.is_available(), reason="only where there is no accelerator")
def test_an_accelerator_that_is_not_here_is_named():
    with pytest.raises(ConfigurationError, match=r"no available device for 'linear2': 0 .*has no accelerator"):
        accelerate_nb.dispatch_model(seeded(Small), {"linear1": "cpu", "batchnorm": "cpu", "linear2": 0})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator beside the CPU")
@pytest.mark.parametrize("make", [lambda: seeded(Deep), lambda: seeded(Tied), gpt2], ids=["deep", "tied", "gpt2"])
def test_a_model_runs_on_an_accelerator_with_parts_elsewhere(make, tmp_path):
    plain, inputs = make(), torch.ones(2, 8) if hasattr(make(), "gain") else WORDS
    whole = our_modeling.compute_module_sizes(plain)[""]
    budget = {0: whole // 2, "cpu": whole // 3}
    device_map = our_modeling.infer_auto_device_map(plain, budget)
    model = accelerate_nb.dispatch_model(make(), device_map, offload_dir=tmp_path)
    output = run(model, inputs)
    assert output.device.type == "cpu"
    assert torch.allclose(output, run(plain, inputs), atol=1e-4)
    assert differences(our_modeling.get_state_dict_offloaded_model(model), plain) == []


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.int64]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_each_side_reads_the_tensors_that_the_other_wrote(dtype, shape, tmp_path):
    tensor = torch.arange(6).to(torch.float32)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    index = ours.offload_weight(tensor, "w", tmp_path, {})
    found = ours.load_offloaded_weight(tmp_path / "w.dat", index["w"])
    assert found.dtype == dtype
    assert found.shape == torch.Size(shape)
    assert torch.equal(found.float(), tensor.float())
    assert torch.equal(theirs.load_offloaded_weight(str(tmp_path / "w.dat"), index["w"]).float(), tensor.float())
    assert theirs.offload_weight(tensor, "v", tmp_path, {})["v"] == index["w"]
    assert torch.equal(ours.load_offloaded_weight(tmp_path / "v.dat", index["w"]).float(), tensor.float())


def test_a_folder_never_mixes_old_weights_with_new_ones(tmp_path):
    ours.offload_state_dict(tmp_path, {"a": torch.zeros(4), "b": torch.zeros(4)})
    with pytest.raises(RuntimeError):  # in the middle of writing
        ours.offload_state_dict(tmp_path, {"a": torch.ones(4), "c": torch.ones(2).to_sparse()})
    assert sorted(os.listdir(tmp_path)) == ["a.dat", "b.dat", "index.json"]
    weights = ours.OffloadedWeightsLoader(save_folder=tmp_path)
    assert list(weights) == ["b"]  # `a` is new, and an index with both would tell of a model that never was
    assert torch.equal(weights["b"], torch.zeros(4))
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json should be an index in JSON, but is damaged"):
        ours.OffloadedWeightsLoader(save_folder=tmp_path)


def test_a_loader_reads_safetensors_that_an_index_names(tmp_path):
    save_file({"x": torch.arange(4.0)}, tmp_path / "m.safetensors")
    entry = {"safetensors_file": str(tmp_path / "m.safetensors"), "weight_name": "x", "dtype": "float16"}
    index = {"h.10.w": entry, "lost": {**entry, "weight_name": "y"}}
    loader = ours.OffloadedWeightsLoader({"h.1.w": torch.ones(1)}, index=index)
    assert torch.equal(loader["h.10.w"], torch.arange(4.0).half())
    assert list(loader) == ["h.1.w", "h.10.w", "lost"]
    part = ours.PrefixedDataset(loader, "h.")
    assert list(part) == ["1.w", "10.w"]
    assert len(part) == 2
    assert torch.equal(part["1.w"], torch.ones(1))
    with pytest.raises(CheckpointError, match=r"m\.safetensors should hold 'y'"):
        loader["lost"]
    with pytest.raises(ValueError, match="Need either"):
        ours.OffloadedWeightsLoader()
    assert list(ours.extract_submodules_state_dict(dict.fromkeys(loader, 0), ["h.1"])) == ["h.1.w"]
    assert len(ours.extract_submodules_state_dict(dict.fromkeys(loader, 0), [""])) == 3


def test_quantized_models_are_refused_clearly():
    config = BnbQuantizationConfig(load_in_8bit=True)
    assert config.target_dtype == torch.int8
    with pytest.raises(NotImplementedError, match="Let transformers load the model"):
        load_and_quantize_model(nn.Linear(2, 2), config)
    with pytest.raises(ValueError, match="exactly one"):
        BnbQuantizationConfig()
    with pytest.raises(ValueError, match="fp4"):
        BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="int4")
    assert not has_4bit_bnb_layers(nn.Linear(2, 2))
