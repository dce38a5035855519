"""A model's weights are found in whatever a person names, and none of them is read."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from accelerate_nb.big_models.estimate import model_outline
from accelerate_nb.big_models.estimate.model_outline import outline
from accelerate_nb.errors import CheckpointError, ConfigurationError, MissingExtraError
from tests.big_models.models import Deep, Small, Tied

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
    return sum(parameter.numbers for parameter in found.parameters)


@pytest.mark.parametrize(
    ("name", "arguments", "hidden"),
    [
        ("Net", {}, 8),
        ("Net", {"hidden": 3}, 3),
        ("made", {}, 2),
        ("needs", {"hidden": 1}, 1),
        ("net", {}, 5),
        ("", {}, 8),
    ],
)
def test_code_is_named_and_its_weights_take_no_memory(code, name, arguments, hidden):
    if not name:
        text = CODE.replace("net = Net(5)", "")
        with open(code, "w", encoding="utf-8") as file:
            file.write(text)
    before = list(sys.path)
    found = outline(f"{code}:{name}" if name else code, arguments)
    assert numbers(found) == hidden * (100_000_000_000 + 1)
    assert sys.path == before


def test_a_module_of_python_is_found_where_we_are(code, monkeypatch):
    monkeypatch.chdir(os.path.dirname(code))
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
        ("needs", {}, "missing a required argument: 'hidden'"),
        ("Net", {"wide": 1}, "unexpected keyword argument 'wide'"),
        ("counts", {}, "should be or give a torch.nn.Module, but is a int"),
        ("net", {"hidden": 1}, "takes no arguments"),
        ("", {}, "has several models: Net, net"),
    ],
)
def test_what_is_wrong_with_a_name_is_reported(code, name, arguments, message):
    with pytest.raises(ConfigurationError) as caught:
        outline(f"{code}:{name}" if name else code, arguments)
    assert message in str(caught.value)


def test_an_error_of_the_persons_own_code_stays_one(code):
    with pytest.raises(KeyError, match="mine"):
        outline(f"{code}:breaks")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("meta-llama/Llama-3", "nothing is downloaded"),
        ("no_such_package.models:Net", "There is no module no_such_package"),
        ("none.py:Net", "is not there"),
    ],
)
def test_what_is_not_here_is_reported(source, message):
    with pytest.raises(ConfigurationError, match=message):
        outline(source)


def test_a_notebook_is_to_be_exported_first(tmp_path):
    (tmp_path / "a.ipynb").write_text("{}")
    with pytest.raises(ConfigurationError, match="accelerate-nb export"):
        outline(str(tmp_path / "a.ipynb"))


@pytest.mark.parametrize("name", ["model.safetensors", ""])
def test_the_beginning_of_a_file_is_enough(tmp_path, name):
    weights = {**Deep().half().state_dict(), "f8": torch.zeros(3).to(torch.float8_e4m3fn), "flag": torch.tensor([True])}
    save_file(weights, tmp_path / "model.safetensors")
    found = outline(str(tmp_path / name))
    assert {weight.name: (weight.shape, weight.itemsize) for weight in found.weights} == {
        name: (tuple(tensor.shape), tensor.element_size()) for name, tensor in weights.items()
    }
    assert [buffer.name for buffer in found.buffers] == ["flag"]
    assert {weight.layer for weight in found.weights if weight.name.startswith("head")} == {"head"}


def test_several_files_are_one_model(tmp_path):
    save_file({"a": torch.zeros(3)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    assert numbers(outline(str(index))) == numbers(outline(str(tmp_path))) == 7


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"epoch": 3, "model_state_dict": state}])
def test_a_checkpoint_of_torch_is_read_without_its_numbers(tmp_path, wrap):
    torch.save(wrap(Tied().state_dict()), tmp_path / "a.pt")
    found = outline(str(tmp_path / "a.pt"))
    # weights under two names count once
    assert numbers(found) == sum(parameter.numel() for parameter in Tied().parameters())


def test_shards_are_listed(tmp_path):
    saved = {"model": Small().state_dict(), "optimizer": {"x": torch.zeros(1000)}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path / "pytorch_model_fsdp_0"), no_dist=True)
    assert {weight.name for weight in outline(str(tmp_path)).weights} == set(Small().state_dict())


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_a_damaged_file_is_an_error(tmp_path, name):
    (tmp_path / name).write_bytes(b"what is this")
    with pytest.raises(CheckpointError, match=r"a\.\w+ should"):
        outline(str(tmp_path / name))


def test_a_file_with_no_weights_reports_what_it_holds(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"holds a mapping of \['epoch'\]"):
        outline(str(tmp_path / "a.pt"))


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_a_checkpoint_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, "a.pt")
    with pytest.raises(CheckpointError, match="could run code"):
        outline("a.pt")
    assert not os.path.exists("evil")


def configured(folder, **more):
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, **more})
    )
    return str(folder)


def test_a_configuration_that_names_no_class_gives_the_model_without_a_head(tmp_path):
    assert outline(configured(tmp_path)).source.startswith("GPT2Model as ")


def test_a_configuration_that_cannot_be_is_reported(tmp_path):
    with pytest.raises(ConfigurationError, match="should describe a model that transformers"):
        outline(configured(tmp_path, model_type="of_nobody"))


def test_without_transformers_weights_that_are_there_are_enough(tmp_path, monkeypatch):
    folder = configured(tmp_path)
    monkeypatch.setattr(model_outline.importlib.util, "find_spec", lambda name: None)
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
