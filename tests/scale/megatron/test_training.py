"""Models of megatron-core train in parts as a plain GPT of PyTorch does that has the same weights, on CPUs behind a shim."""

from functools import cache
from typing import Any

import pytest
import torch

from accelerate_nb import Accelerator
from accelerate_nb.errors import ConfigurationError, NotYetError
from accelerate_nb.utils import MegatronLMPlugin, ParallelismConfig
from tests.ranks import run_on_ranks
from tests.scale.megatron.cuda_on_cpu import LIMIT, on_ranks
from tests.scale.megatron.gpt import (
    BATCH,
    EXPERTS,
    LENGTH,
    VOCABULARY,
    assert_equal,
    assert_refused,
    assert_weights,
    batches,
    by_megatrons_names,
    megatron_gpt,
    megatron_inputs,
    plain_gpt,
    step_on,
    train,
    train_plainly,
    transformer_config,
)
from tests.scale.megatron.layers import layers_for_cut_sequences

MOST, ACCUMULATION = 0.5, 2
# AdamW makes steps of the rounding of gradients that are zero, those of keys' biases, where it adds less.
EPSILON = 1e-3


@cache
def plainly(tied: bool = False, has_experts: bool = False, steps: int = 1) -> dict[str, Any]:
    """The training by hand, on one process, with the weights by Megatron's names."""
    model = plain_gpt(tied, has_experts)
    found = train_plainly(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), clip=MOST, steps=steps)
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
    assert_equal(
        on_ranks(trained, ranks, settings, model_settings, name in TIED, by), plainly(name in TIED, steps=ACCUMULATION)
    )


def refused() -> None:
    """Megatron does not do this, or not so, on two stages."""
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(pp_degree=2))
    mesh = accelerator.world.mesh
    chunks = megatron_gpt(transformer_config(mesh, virtual_pipeline_model_parallel_size=2))
    model = accelerator.prepare(megatron_gpt(transformer_config(mesh)))
    inputs, keywords = megatron_inputs(batches()[0])
    assert_refused("is no model of megatron-core", lambda: accelerator.prepare(torch.nn.Linear(2, 2)))
    assert_refused("overlap_p2p_comm=True", lambda: accelerator.prepare(chunks))
    assert_refused("accelerator.train_step", lambda: model(*inputs, **keywords))
    with torch.no_grad():
        assert model(*inputs).shape == (BATCH, LENGTH, VOCABULARY)
    accelerator.end_training()
    compiling = Accelerator(cpu=True, dynamo_backend="eager", megatron_lm_plugin=MegatronLMPlugin(pp_degree=2))
    other = megatron_gpt(transformer_config(mesh))
    text = "dynamo_backend was requested with Megatron"
    assert_refused(text, lambda: compiling.prepare(other), ConfigurationError)
    compiling.end_training()
    plugin = MegatronLMPlugin(sequence_parallelism=True)
    text = "was requested on the mesh dp_replicate 2, but sequences are cut among the processes that split a layer"
    assert_refused(text, lambda: Accelerator(cpu=True, megatron_lm_plugin=plugin), ConfigurationError)
    plugin = MegatronLMPlugin(expert_model_parallel_size=2, use_distributed_optimizer=True)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    model = megatron_gpt(transformer_config(accelerator.world.mesh, num_layers=1, **MIXTURE))
    optimizer = torch.optim.AdamW(model.parameters())
    text = "whose experts are on different processes"
    assert_refused(text, lambda: accelerator.prepare(model, optimizer), NotYetError)
    accelerator.end_training()


def test_what_megatron_does_not_do_is_refused_by_name() -> None:
    on_ranks(refused, 2)


def without_cuda() -> None:
    text = "computes on the current CUDA device"
    assert_refused(text, lambda: Accelerator(cpu=True, strategy="megatron"), ConfigurationError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_cpu_is_refused_by_name() -> None:
    run_on_ranks(without_cuda, 1, limit=LIMIT)


def in_16_bits(precision: str, is_distributed: bool) -> dict[str, Any]:
    plugin = MegatronLMPlugin(gradient_clipping=MOST, use_distributed_optimizer=is_distributed)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, megatron_lm_plugin=plugin)
    model = megatron_gpt(transformer_config(accelerator.world.mesh))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=EPSILON)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.strategy.load_model_state(model, by_megatrons_names(plain_gpt().state_dict()))
    losses, dtype = [], next(model.parameters()).dtype
    for batch in batches():
        losses.append(accelerator.reduce(step_on(accelerator, model, batch), "mean").item())
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.float() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return {"state": state, "losses": losses, "dtype": dtype, "skipped": optimizer.step_was_skipped}


TYPES = {"no": (torch.float32, 1e-4), "bf16": (torch.bfloat16, 0.05), "fp16": (torch.float16, 0.01)}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("precision", "is_distributed"), [("no", True), ("bf16", False), ("bf16", True), ("fp16", False)]
)
def test_optimizers_of_megatron_step_as_torchs_own(precision: str, is_distributed: bool) -> None:
    found, (dtype, rounding) = on_ranks(in_16_bits, 2, precision, is_distributed), TYPES[precision]
    model = plain_gpt()
    wanted = train_plainly(model, torch.optim.AdamW(model.parameters(), 0.01, eps=EPSILON), clip=MOST)
    for item in found:
        assert item["losses"] == pytest.approx(wanted["losses"], abs=rounding)
        assert item["dtype"] == dtype
        assert not item["skipped"]
    assert_weights(found[0]["state"], by_megatrons_names(model.state_dict()), rounding)


# Degrees that Megatron's own layers have on GPUs alone, with layers that a CPU can compute


def trained_from_the_middle(
    folder: str, settings: dict[str, Any], model_settings: dict[str, Any], mesh: ParallelismConfig | None = None
) -> dict[str, Any]:
    """The training on this rank, the second half of which it makes twice: the other time from a checkpoint."""
    from megatron.core.transformer.moe import moe_utils

    plugin = MegatronLMPlugin(gradient_clipping=0.0, **settings)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, parallelism_config=mesh)
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
# The settings of the plugin, those of the model, and a mesh.
DEGREES: dict[str, tuple[Any, ...]] = {
    "sequences along widths": ({"tp_degree": 2, "sequence_parallelism": True}, {"sequence_parallel": True}),
    "sequences along a mesh's widths": (
        {"sequence_parallelism": True},
        {"sequence_parallel": True},
        ParallelismConfig(tp_size=2),
    ),
    "contexts": ({"context_parallel_size": 2}, {}),
    "experts": ({"expert_model_parallel_size": 2}, MIXTURE),
    "experts along widths": (
        {"tp_degree": 2, "sequence_parallelism": True, "expert_model_parallel_size": 2},
        {**MIXTURE, "sequence_parallel": True},
    ),
}


def all_trained(folder: str) -> dict[str, dict[str, Any]]:
    return {name: trained_from_the_middle(f"{folder}/{name}", *settings) for name, settings in DEGREES.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return on_ranks(all_trained, 2, str(tmp_path_factory.mktemp("degrees")))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", DEGREES)
def test_degrees_of_layers_that_need_a_gpu_end_in_the_weights_of_a_plain_gpt(
    name: str, found: list[dict[str, dict[str, Any]]]
) -> None:
    wanted = plainly(has_experts="experts" in name)
    # the second half is made twice
    twice = {key: [*wanted[key], *wanted[key][2:]] for key in ("losses", "norms")}
    assert_equal([outcome[name] for outcome in found], {**wanted, **twice})
