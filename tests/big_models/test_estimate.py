"""Estimates are what torch really takes and what Accelerate estimates, from whatever a person names, of which nothing is read."""

import json
import sys
from pathlib import Path

import accelerate.utils as theirs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights as their_empty
from safetensors.torch import save_file
from torch import nn

from accelerate_nb import Accelerator, ConfigurationError, ParallelismConfig
from accelerate_nb.big_models import estimate
from accelerate_nb.big_models.estimate import DTYPES, bytes_of, largest_layer, of_module, on_mesh, outline
from accelerate_nb.errors import CheckpointError, MissingExtraError
from accelerate_nb.runtime.operations.sharded_tensors import local
from accelerate_nb.runtime.world.world import Mesh
from tests.big_models.models import Deep, Small, Tied
from tests.ranks import run_on_ranks
from tests.runtime.checkpoints.test_damage import Evil
from tests.runtime.strategies.tiny_llama import batches, llama

MODELS = [Small, Deep, Tied, lambda: nn.TransformerEncoderLayer(8, 2, 16), lambda: nn.Conv2d(3, 5, 3)]
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS = {
    "BertForMaskedLM": {"model_type": "bert", **SIZES},
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
    "LlamaForCausalLM": {"model_type": "llama", **SIZES, "num_hidden_layers": 2},
}


def bytes_in(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def trained(model, make, dtype) -> tuple[int, int, int]:
    """What weights, gradients and the optimizer's state really take, after a step."""
    model = model.to(dtype)
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    weights = bytes_in({id(item): item for item in (*model.parameters(), *model.buffers())}.values())
    return weights, bytes_in(parameter.grad for parameter in model.parameters()), bytes_in(states)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", torch.optim.AdamW),
        ("adam", torch.optim.Adam),
        ("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        ("sgd-momentum", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
        ("adafactor", torch.optim.Adafactor),
    ],
)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_takes_what_was_estimated(name, make, model, precision):
    (state,) = on_mesh(of_module(model(), "here"), precision, name, Mesh())
    found = trained(model(), make, getattr(torch, precision))
    assert (state.weights, state.gradients, state.optimizer) == found


def test_weights_that_are_frozen_have_neither_gradient_nor_state():
    model = Deep()
    for parameter in model.body.parameters():
        parameter.requires_grad = False
    rest = bytes_in(parameter for parameter in model.parameters() if parameter.requires_grad)
    (state,) = on_mesh(of_module(model, "here"), "float32", "adam", Mesh())
    assert state.gradients == rest
    assert state.weights == bytes_in([*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_gives_what_accelerate_estimates(tmp_path, name):
    import transformers

    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], "architectures": [name]}))
    ours = outline(str(tmp_path))
    assert name in ours.source
    with their_empty():
        model = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(tmp_path))
    # under their empty weights the tied ones are two, and both are counted
    model.tie_weights()
    total, (layer, names) = theirs.calculate_maximum_sizes(model)
    assert bytes_of(ours.weights, 4) == total
    name, size = largest_layer(ours, 4)
    assert size == layer
    assert name in names
    # Accelerate divides whatever there is, numbers that stay as they are too
    others = sum(weight.numbers * weight.itemsize for weight in ours.weights if not weight.is_float)
    for size in DTYPES.values():
        assert bytes_of(ours.weights, size) == (total - others) / 4 * size + others


# Accelerate passes over what stands beside layers, as the weights of nn.MultiheadAttention do
@pytest.mark.parametrize("model", [model for model in MODELS if model is not MODELS[3]])
def test_the_largest_layer_is_accelerates(model):
    total, (layer, names) = theirs.calculate_maximum_sizes(model())
    ours = of_module(model(), "here")
    name, size = largest_layer(ours, 4)
    assert (bytes_of(ours.weights, 4), size) == (total, layer)
    assert name in names
    beside = of_module(nn.TransformerEncoderLayer(8, 2, 4), "here")
    assert largest_layer(beside, 4) == ("self_attn.in_proj_weight", 3 * 8 * 8 * 4)


def test_copies_hold_gradients_twice_and_shards_a_layer_whole_with_its_gradient():
    found = of_module(nn.Linear(1024, 1024, bias=False), "here")
    size = 4 << 20
    meshes = Mesh(), Mesh(dp_replicate=4), Mesh(dp_shard=4)
    (alone,), (copied,), (sharded,) = (on_mesh(found, "float32", "sgd-momentum", mesh) for mesh in meshes)
    assert alone == estimate.RankBytes(size, size, size, 0)
    assert copied == estimate.RankBytes(size, size, size, size)
    assert sharded == estimate.RankBytes(size // 4, size // 4, size // 4, 2 * size)


def test_mixed_precision_keeps_float32_and_copies_of_16_bits():
    found = of_module(Small(), "here")
    (plain,), (mixed,) = (on_mesh(found, precision, "adamw", Mesh()) for precision in ("float32", "mixed"))
    assert (mixed.weights, mixed.gradients, mixed.optimizer) == (plain.weights, plain.gradients, plain.optimizer)
    assert mixed.extra == 2 * sum(parameter.numel() for parameter in Small().parameters())


def test_adam_in_8_bits_has_a_byte_for_a_number_and_a_scale_for_a_block():
    for width, size in ((128, 2 * (8192 + 4 * 32)), (1, 2 * 64 * 4)):
        (state,) = on_mesh(of_module(nn.Linear(width, 64, bias=False), "here"), "float32", "adam8bit", Mesh())
        assert state.optimizer == size


def held(degrees: dict[str, int]) -> tuple[int, ...]:
    """The bytes of weights, gradients and optimizer states that this rank has in memory after a step."""
    config = ParallelismConfig(**{f"{axis}_size": degree for axis, degree in degrees.items()})
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    replica, replicas = accelerator.strategy.data_replicas
    batch = batches()[0][replica::replicas]
    accelerator.train_step(model, input_ids=batch, labels=batch)
    optimizer.step()
    tensors = [weight for weight in (*model.parameters(), *model.buffers()) if not weight.is_meta]
    states = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return tuple(sum(local(tensor).nbytes for tensor in found) for found in (tensors, gradients, states))


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_shard": 2},
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp_shard": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda degrees: " x ".join(degrees),
)
def test_each_rank_holds_what_was_estimated(degrees: dict[str, int]) -> None:
    mesh = Mesh(**degrees)
    found = run_on_ranks(held, mesh.size, degrees)
    stages = on_mesh(of_module(llama(), "here"), "float32", "adamw", mesh)
    for rank, (weights, gradients, remembered) in enumerate(found):
        stage = stages[mesh.coordinates(rank).get("pp", 0)]
        assert (stage.weights, stage.gradients, stage.optimizer) == (weights, gradients, remembered), rank


def test_the_smallest_mesh_fits_and_half_of_it_does_not() -> None:
    outline = of_module(llama(), "here")

    def needed(mesh: Mesh) -> int:
        return max(stage.total for stage in on_mesh(outline, "mixed", "adamw", mesh))

    alone = needed(Mesh())
    assert estimate.smallest_mesh(outline, "mixed", "adamw", 2 * alone) == Mesh()
    memory = alone // 2
    found = estimate.smallest_mesh(outline, "mixed", "adamw", memory)
    assert found is not None
    assert found.size > 1
    assert needed(found) <= 0.8 * memory
    assert needed(Mesh(dp_shard=found.size // 2)) > 0.8 * memory
    assert estimate.smallest_mesh(outline, "mixed", "adamw", 100) is None


def test_what_can_not_be_estimated_is_named() -> None:
    with pytest.raises(ConfigurationError, match="here has no plan by which tp would split it"):
        on_mesh(of_module(Deep(), "here"), "mixed", "adamw", Mesh(tp=2))
    with pytest.raises(ConfigurationError, match=r"on 3 stages .* but the model has 2 layers"):
        on_mesh(of_module(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "here"), "mixed", "adamw", Mesh(pp=3))


CODE = """
import torch
from dataclasses import dataclass
from torch import nn
from beside import WIDTH

@dataclass
class Shape:
    width: int = WIDTH

class Net(nn.Module):
    def __init__(self, hidden: int = 8):
        super().__init__()
        self.inner = nn.Linear(Shape().width, hidden)

def made(hidden=2):
    return Net(hidden)

def needs(hidden): return Net(hidden)
def breaks(): raise KeyError("mine")
def counts(): return 3

net = Net(5)
"""

LOOKING = """
import torch
from torch import nn
def looks(): return nn.Linear(int(nn.Linear(2, 2).weight.sum()), 1)
def spaced(): return nn.Linear(int(torch.linspace(1, 3, 3)[-1].item()), 2)
"""


@pytest.fixture
def code(tmp_path):
    (tmp_path / "models_of_a_test.py").write_text(CODE)
    (tmp_path / "beside.py").write_text("WIDTH = 100_000_000_000")
    yield str(tmp_path / "models_of_a_test.py")
    for name in ("models_of_a_test", "beside"):
        sys.modules.pop(name, None)


def numbers(found) -> int:
    return sum(weight.numbers for weight in found.weights if not weight.is_buffer)


@pytest.mark.parametrize(
    ("name", "arguments", "hidden"),
    [
        *(("Net", {}, 8), ("Net", {"hidden": 3}, 3), ("made", {}, 2)),
        *(("needs", {"hidden": 1}, 1), ("net", {}, 5), ("", {}, 8)),
    ],
)
def test_code_is_named_and_its_weights_take_no_memory(code, name, arguments, hidden):
    if not name:
        Path(code).write_text(CODE.replace("net = Net(5)", ""))
    before = list(sys.path)
    found = outline(f"{code}:{name}" if name else code, arguments)
    assert numbers(found) == hidden * (100_000_000_000 + 1)
    assert sys.path == before


def test_a_module_of_python_is_found_where_we_are(code, monkeypatch):
    monkeypatch.chdir(Path(code).parent)
    assert numbers(outline("models_of_a_test:Net", {"hidden": 1})) == 100_000_000_001


def test_a_model_may_look_at_numbers_that_are_no_weights(tmp_path):
    file = tmp_path / "looking_of_a_test.py"
    file.write_text(LOOKING)
    assert numbers(outline(f"{file}:spaced")) == 8
    with pytest.raises(ConfigurationError, match="needs the numbers of its weights"):
        outline(f"{file}:looks")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("nothing", {}, "has no nothing. It has Net, net"),
        ("counts", {}, "should be or give a torch.nn.Module, but is a int"),
        ("net", {"hidden": 1}, "takes no arguments"),
        ("", {}, "has several models: Net, net"),
    ],
)
def test_what_is_wrong_with_a_name_is_reported(code, name, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        outline(f"{code}:{name}" if name else code, arguments)
    with pytest.raises(KeyError, match="mine"):  # an error of the person's own code stays one
        outline(f"{code}:breaks")


def test_what_is_not_here_is_not_downloaded_and_a_notebook_is_to_be_exported_first(tmp_path):
    (tmp_path / "a.ipynb").write_text("{}")
    for source, message in (
        ("meta-llama/Llama-3", "is no file or folder, and nothing is downloaded"),
        (str(tmp_path / "a.ipynb"), "accelerate-nb export"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            outline(source)


@pytest.mark.parametrize("name", ["model.safetensors", ""])
def test_the_beginning_of_a_file_is_enough(tmp_path, name):
    weights = {**Deep().half().state_dict(), "f8": torch.zeros(3).to(torch.float8_e4m3fn), "flag": torch.tensor([True])}
    save_file(weights, tmp_path / "model.safetensors")
    found = outline(str(tmp_path / name))
    assert {weight.name: (weight.shape, weight.itemsize) for weight in found.weights} == {
        name: (tuple(tensor.shape), tensor.element_size()) for name, tensor in weights.items()
    }
    assert [buffer.name for buffer in found.weights if buffer.is_buffer] == ["flag"]
    assert {weight.layer for weight in found.weights if weight.name.startswith("head")} == {"head"}


def test_several_files_are_one_model(tmp_path):
    save_file({"a": torch.zeros(3)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    assert numbers(outline(str(index))) == numbers(outline(str(tmp_path))) == 7


def test_a_checkpoint_of_torch_is_read_without_its_numbers_and_shards_are_listed(tmp_path):
    state = Tied().state_dict()
    for content in (state, {"epoch": 3, "model_state_dict": state}):
        torch.save(content, tmp_path / "a.pt")
        # weights under two names count once
        assert numbers(outline(str(tmp_path / "a.pt"))) == sum(parameter.numel() for parameter in Tied().parameters())
    (tmp_path / "a.pt").unlink()
    saved = {"model": Small().state_dict(), "optimizer": {"x": torch.zeros(1000)}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path / "pytorch_model_fsdp_0"), no_dist=True)
    assert {weight.name for weight in outline(str(tmp_path)).weights} == set(Small().state_dict())


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.safetensors", lambda path: path.write_bytes(b"what is this"), r"a\.safetensors should"),
        ("a.pt", lambda path: path.write_bytes(b"what is this"), r"a\.pt should"),
        ("a.pt", lambda path: torch.save({"epoch": 3}, path), r"holds a mapping of \['epoch'\]"),
        ("a.pt", lambda path: torch.save({"a": Evil(path.parent / "proof")}, path), "could run code"),
    ],
)
def test_a_file_that_is_damaged_holds_no_weights_or_code_is_an_error(tmp_path, name, write, message):
    write(tmp_path / name)
    with pytest.raises(CheckpointError, match=message):
        outline(str(tmp_path / name))
    assert not (tmp_path / "proof").exists()


def configured(folder, **more):
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_configuration_without_a_class_gives_the_model_without_a_head_and_an_unknown_type_is_an_error(tmp_path):
    assert outline(configured(tmp_path)).source.startswith("GPT2Model as ")
    with pytest.raises(ConfigurationError, match="should describe a model that transformers"):
        outline(configured(tmp_path, model_type="of_nobody"))


def test_without_transformers_weights_that_are_there_are_enough(tmp_path, monkeypatch):
    folder = configured(tmp_path)
    monkeypatch.setattr(estimate.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install transformers"):
        outline(folder)
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert numbers(outline(folder)) == 3


def test_code_beside_a_configuration_is_run_only_where_it_is_trusted(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from transformers import PretrainedConfig, PreTrainedModel\nfrom torch import nn\n"
        "class C(PretrainedConfig):\n    model_type = 'mine'\n"
        "class M(PreTrainedModel):\n    config_class = C\n"
        "    def __init__(self, config):\n        super().__init__(config)\n        self.l = nn.Linear(3, 4)\n"
        "        self.post_init()\n"
    )
    words = {"AutoConfig": "mine.C", "AutoModel": "mine.M"}
    folder = configured(tmp_path, model_type="mine", auto_map=words, architectures=["M"])
    with pytest.raises(ConfigurationError, match="--trust_remote_code"):
        outline(folder)
    assert numbers(outline(folder, trusts=True)) == 16
