"""Degrees that Megatron's own layers have on GPUs alone train as a plain GPT does, with layers that a CPU can compute."""

from functools import cache
from typing import Any

import pytest
import torch

from accelerate_nb import Accelerator
from accelerate_nb.errors import NotYetError
from accelerate_nb.utils import MegatronLMPlugin
from tests.scale.megatron.cuda_on_cpu import on_ranks
from tests.scale.megatron.gpt import (
    EXPERTS,
    assert_equal,
    batches,
    by_megatrons_names,
    megatron_gpt,
    plain_gpt,
    train,
    train_plainly,
    transformer_config,
)
from tests.scale.megatron.layers import layers_for_cut_sequences

MOST = 0.5


@cache
def plainly(has_experts: bool) -> dict[str, Any]:
    """The training by hand, on one process."""
    model = plain_gpt(has_experts=has_experts)
    found = train_plainly(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), clip=MOST)
    # the second half is made twice
    twice = {name: [*values, *values[2:]] for name, values in found.items()}
    return {"state": by_megatrons_names(model.state_dict()), **twice}


def trained(folder: str, settings: dict[str, Any], model_settings: dict[str, Any]) -> dict[str, Any]:
    """The training on this rank, the second half of which it makes twice: the other time from a checkpoint."""
    from megatron.core.transformer.moe import moe_utils

    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(gradient_clipping=0.0, **settings))
    # megatron-core 0.16 reads the name without Transformer Engine, which it is of
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    has_experts = "num_moe_experts" in model_settings
    config = transformer_config(accelerator.world.mesh, **model_settings)
    is_cut = config.context_parallel_size > 1 or config.sequence_parallel
    model = megatron_gpt(config, layer_spec=layers_for_cut_sequences(config) if is_cut else None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    of_experts = [weight for weight in model.parameters() if not getattr(weight, "allreduce", True)]
    for weight in of_experts:
        weight.data.fill_(accelerator.process_index)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert all((weight == accelerator.process_index).all() for weight in of_experts)
    state = by_megatrons_names(plain_gpt(has_experts=has_experts).state_dict())
    accelerator.strategy.load_model_state(model, state)
    first, second = batches()[:2], batches()[2:]
    found = [train(accelerator, model, optimizer, first, clip=MOST)]
    accelerator.save_state(folder)
    found.append(train(accelerator, model, optimizer, second, clip=MOST))
    accelerator.load_state(folder)
    found.append(train(accelerator, model, optimizer, second, clip=MOST))
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return {"state": state, **{name: [value for part in found for value in part[name]] for name in ("losses", "norms")}}


MIXTURE = {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}
# The settings of the plugin, and those of the model.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sequences along widths": ({"tp_degree": 2, "sequence_parallelism": True}, {"sequence_parallel": True}),
    "contexts": ({"context_parallel_size": 2}, {}),
    "experts": ({"expert_model_parallel_size": 2}, MIXTURE),
    "experts along widths": (
        {"tp_degree": 2, "sequence_parallelism": True, "expert_model_parallel_size": 2},
        {**MIXTURE, "sequence_parallel": True},
    ),
}


def all_trained(folder: str) -> dict[str, dict[str, Any]]:
    found = {name: trained(f"{folder}/{name}", *settings) for name, settings in CASES.items()}
    return {**found, "refused": {"message": refused()}}


def refused() -> str:
    plugin = MegatronLMPlugin(expert_model_parallel_size=2, use_distributed_optimizer=True)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    model = megatron_gpt(transformer_config(accelerator.world.mesh, num_layers=1, **MIXTURE))
    with pytest.raises(NotYetError) as caught:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.end_training()
    return str(caught.value)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return on_ranks(all_trained, 2, str(tmp_path_factory.mktemp("degrees")))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CASES)
def test_a_training_ends_in_the_weights_of_a_plain_gpt(name: str, found: list[dict[str, dict[str, Any]]]) -> None:
    assert_equal([outcome[name] for outcome in found], plainly("experts" in name))


def test_parts_of_the_optimizer_are_refused_beside_experts(found: list[dict[str, dict[str, Any]]]) -> None:
    assert all("whose experts are on different processes" in outcome["refused"]["message"] for outcome in found)
