"""Models of megatron-core train in parts as a plain GPT of PyTorch does that has the same weights, on CPUs behind a shim."""

from typing import Any

import pytest
import torch

from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError
from accelerate_nb.utils import MegatronLMPlugin
from tests.ranks import run_on_ranks
from tests.scale.megatron.cuda_on_cpu import LIMIT, on_ranks
from tests.scale.megatron.gpt import (
    BATCH,
    LENGTH,
    VOCABULARY,
    assert_equal,
    assert_weights,
    batches,
    by_megatrons_names,
    megatron_gpt,
    megatron_inputs,
    message_of,
    plain_gpt,
    step_on,
    train,
    train_plainly,
    transformer_config,
)

MOST, ACCUMULATION = 0.5, 2
# AdamW makes steps of the rounding of gradients that are zero, those of keys' biases, where it adds less.
EPSILON = 1e-3


def plainly(tied: bool) -> dict[str, Any]:
    """The training by hand, with the weights by Megatron's names."""
    model = plain_gpt(tied)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found = train_plainly(model, optimizer, clip=MOST, steps=ACCUMULATION)
    return {"state": by_megatrons_names(model.state_dict(), tied), **found}


def trained(settings: dict[str, Any], model_settings: dict[str, Any], tied: bool, by: str) -> dict[str, Any]:
    plugin = MegatronLMPlugin(gradient_clipping=0.0, **settings)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)
    model = megatron_gpt(transformer_config(accelerator.world.mesh, **model_settings), tied=tied)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.strategy.load_model_state(model, by_megatrons_names(plain_gpt(tied).state_dict(), tied))
    found = train(accelerator, model, optimizer, batches(), clip=MOST, by_backward=by == "backward")
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return {"state": state, **found}


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "widths": (2, {"tp_degree": 2}, {}, "backward"),
    "stages": (2, {"pp_degree": 2, "num_micro_batches": 4}, {}, "train_step"),
    "copies": (2, {"num_micro_batches": 2}, {}, "train_step"),
    "interleaved stages": (
        2,
        {"pp_degree": 2, "num_micro_batches": 4},
        {"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False},
        "train_step",
    ),
    "widths and stages": (4, {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2}, {}, "train_step"),
    "widths and copies": (4, {"tp_degree": 2}, {}, "backward"),
    "recomputed": (
        2,
        {"tp_degree": 2},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "backward",
    ),
}


SLOW = {"widths and stages", "widths and copies", "recomputed"}
TIED = {"stages", "interleaved stages"}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_a_training_ends_in_the_weights_of_a_plain_gpt(name: str) -> None:
    ranks, settings, model_settings, by = CASES[name]
    assert_equal(on_ranks(trained, ranks, settings, model_settings, name in TIED, by), plainly(name in TIED))


def refused() -> list[str]:
    """The messages of what Megatron does not do, or not so, on two stages."""
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(pp_degree=2))
    mesh = accelerator.world.mesh
    chunks = megatron_gpt(transformer_config(mesh, virtual_pipeline_model_parallel_size=2))
    model = accelerator.prepare(megatron_gpt(transformer_config(mesh)))
    inputs, keywords = megatron_inputs(batches()[0])
    found = [
        message_of(lambda: accelerator.prepare(torch.nn.Linear(2, 2))),
        message_of(lambda: accelerator.prepare(chunks)),
        message_of(lambda: model(*inputs, **keywords)),
    ]
    with torch.no_grad():
        found.append(str(tuple(model(*inputs).shape)))
    accelerator.end_training()
    compiling = Accelerator(cpu=True, dynamo_backend="eager", megatron_lm_plugin=MegatronLMPlugin(pp_degree=2))
    with pytest.raises(ConfigurationError) as compiled:
        compiling.prepare(megatron_gpt(transformer_config(mesh)))
    compiling.end_training()
    return [*found, str(compiled.value)]


def test_what_megatron_does_not_do_is_refused_by_name() -> None:
    texts = [
        "is no model of megatron-core",
        "overlap_p2p_comm=True",
        "accelerator.train_step",
        str((BATCH, LENGTH, VOCABULARY)),
        "dynamo_backend was requested with Megatron",
    ]
    for found in on_ranks(refused, 2):
        assert all(text in message for text, message in zip(texts, found, strict=True)), found


def without_cuda() -> str:
    with pytest.raises(ConfigurationError) as caught:
        Accelerator(cpu=True, strategy="megatron")
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_cpu_is_refused_by_name() -> None:
    assert "computes on the current CUDA device" in run_on_ranks(without_cuda, 1, limit=LIMIT)[0]


def in_16_bits(precision: str, is_distributed: bool) -> dict[str, Any]:
    plugin = MegatronLMPlugin(gradient_clipping=MOST, use_distributed_optimizer=is_distributed)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, megatron_lm_plugin=plugin)
    model = megatron_gpt(transformer_config(accelerator.world.mesh))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=EPSILON)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.strategy.load_model_state(model, by_megatrons_names(plain_gpt().state_dict()))
    losses = []
    for batch in batches():
        losses.append(accelerator.reduce(step_on(accelerator, model, batch), "mean").item())
        optimizer.step()
        optimizer.zero_grad()
    weight = next(iter(model.parameters()))
    state = {name: value.float() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return {"state": state, "losses": losses, "dtype": str(weight.dtype), "skipped": optimizer.step_was_skipped}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("precision", "is_distributed", "rounding"),
    [("no", True, 1e-4), ("bf16", False, 0.05), ("bf16", True, 0.05)],
)
def test_optimizers_of_megatron_step_as_torchs_own(precision: str, is_distributed: bool, rounding: float) -> None:
    found = on_ranks(in_16_bits, 2, precision, is_distributed)
    model = plain_gpt()
    wanted = train_plainly(model, torch.optim.AdamW(model.parameters(), 0.01, eps=EPSILON), clip=MOST)
    for item in found:
        assert item["losses"] == pytest.approx(wanted["losses"], abs=rounding)
        assert item["dtype"] == ("torch.float32" if precision == "no" else "torch.bfloat16")
        assert not item["skipped"]
    assert_weights(found[0]["state"], by_megatrons_names(model.state_dict()), rounding)
