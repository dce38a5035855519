"""Estimates are what torch really takes, what Accelerate estimates, and what the paper of ZeRO computes."""

from __future__ import annotations

import json

import accelerate.utils as theirs
import pytest
import torch
from accelerate import init_empty_weights as their_empty
from torch import nn

from accelerate_nb.big_models.estimate.memory_estimate import (
    DTYPES,
    TrainingStateSize,
    largest_layer,
    loaded,
    shared,
    training,
)
from accelerate_nb.big_models.estimate.model_outline import of_module, outline
from tests.big_models.models import Deep, Small, Tied

MODELS = [Small, Deep, Tied, lambda: nn.TransformerEncoderLayer(8, 2, 16), lambda: nn.Conv2d(3, 5, 3)]
CONFIGS = {
    "BertForMaskedLM": {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64},
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
    "LlamaForCausalLM": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}


def bytes_of(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def trained(model, make, dtype) -> tuple[int, int, int]:
    """What weights, gradients and the optimizer's state really take, after a step."""
    model = model.to(dtype)
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    weights = bytes_of({id(item): item for item in (*model.parameters(), *model.buffers())}.values())
    return weights, bytes_of(parameter.grad for parameter in model.parameters()), bytes_of(states)


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
    state = training(of_module(model(), "here"), precision, name, 1).alone
    found = trained(model(), make, getattr(torch, precision))
    assert (state.weights, state.gradients, state.optimizer) == found


def test_weights_that_are_frozen_have_neither_gradient_nor_state():
    model = Deep()
    for parameter in model.body.parameters():
        parameter.requires_grad = False
    rest = bytes_of(parameter for parameter in model.parameters() if parameter.requires_grad)
    state = training(of_module(model, "here"), "float32", "adam", 1).alone
    assert state.gradients == rest
    assert state.weights == bytes_of([*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_weights_take_what_was_estimated_in_every_type(model, dtype):
    converted = model().to(getattr(torch, dtype))
    assert loaded(of_module(model(), "here"), dtype).total == bytes_of([*converted.parameters(), *converted.buffers()])


def test_weights_beside_layers_are_layers_too():
    assert largest_layer(of_module(nn.TransformerEncoderLayer(8, 2, 4), "here"), 4) == (
        "self_attn.in_proj_weight",
        3 * 8 * 8 * 4,
    )


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
    assert loaded(ours, "float32").total == total
    assert loaded(ours, "float32").largest_layer == layer
    assert largest_layer(ours, 4)[0] in names
    # Accelerate divides whatever there is, numbers that stay as they are too
    others = sum(weight.numbers * weight.itemsize for weight in ours.weights if not weight.is_float)
    for dtype, size in DTYPES.items():
        assert loaded(ours, dtype).total == (total - others) / 4 * size + others


# Accelerate passes over what stands beside layers, as the weights of nn.MultiheadAttention do
@pytest.mark.parametrize("model", [model for model in MODELS if model is not MODELS[3]])
def test_the_largest_layer_is_accelerates(model):
    total, (layer, names) = theirs.calculate_maximum_sizes(model())
    ours = loaded(of_module(model(), "here"), "float32")
    assert (ours.total, ours.largest_layer) == (total, layer)
    assert largest_layer(of_module(model(), "here"), 4)[0] in names


def test_the_stages_are_those_of_the_paper():
    # figure 1 of Rajbhandari et al. (2020): 7.5 billion parameters, 64 ranks, twelve bytes of optimizer's state for each
    numbers = 7_500_000_000
    ranks = shared(TrainingStateSize(2 * numbers, 2 * numbers, 12 * numbers), 64)
    assert {way: round(state.total / 1e9, 1) for way, state in ranks.items() if way != "ddp"} == {
        "zero-1": 31.4,
        "zero-2": 16.6,
        "zero-3": 1.9,
    }
    assert ranks["ddp"].total - ranks["ddp"].extra == 120_000_000_000


def test_one_rank_shares_nothing():
    alone = TrainingStateSize(10, 10, 20, 5)
    assert set(shared(alone, 1, layer=4).values()) == {alone}


def test_mixed_precision_keeps_float32_and_copies_of_16_bits():
    found = of_module(Small(), "here")
    plain, mixed = (training(found, precision, "adamw", 1).alone for precision in ("float32", "mixed"))
    assert (mixed.weights, mixed.gradients, mixed.optimizer) == (plain.weights, plain.gradients, plain.optimizer)
    assert mixed.extra == 2 * sum(parameter.numel() for parameter in Small().parameters())


def test_a_rank_of_the_third_stage_holds_one_layer_whole():
    found = of_module(Deep(64), "here")
    _, layer = largest_layer(found, 4)
    assert training(found, "float32", "sgd", 4).ranks["zero-3"].extra == 2 * layer


def test_adam_in_8_bits_has_a_byte_for_a_number_and_a_scale_for_a_block():
    found = of_module(nn.Linear(128, 64, bias=False), "here")
    assert training(found, "float32", "adam8bit", 1).alone.optimizer == 2 * (8192 + 4 * 32)
    small = of_module(nn.Linear(8, 8, bias=False), "here")
    assert training(small, "float32", "adam8bit", 1).alone.optimizer == 2 * 64 * 4
