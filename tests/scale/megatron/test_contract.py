"""Copies and widths by Megatron end a training in the weights of one process, with the very loop that other strategies run."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from accelerate_nb.utils import MegatronLMPlugin
from tests.runtime.strategies.contract import (
    ACCUMULATION,
    ADAMW_ROUNDING,
    MEAN,
    ROUNDING,
    Deletion,
    Outcome,
    StrategyCase,
    difference,
    trained,
)
from tests.scale.megatron.cuda_on_cpu import on_ranks

pytestmark = pytest.mark.timeout(180)

# Between two steps: Megatron can't give back the gradients of a window.
SAVED_AFTER = 2 * ACCUMULATION
NORM, SUM = "the norm at clipping", "the sum of outputs"


def in_megatrons_layers(network: nn.Module) -> nn.Module:
    """This process's part of the network."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Network(MegatronModule):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            settings = {"config": config, "init_method": config.init_method, "skip_bias_add": False, "bias": True}
            self.first = ColumnParallelLinear(8, 16, gather_output=False, **settings)
            self.second = RowParallelLinear(16, 16, input_is_parallel=True, **settings)
            self.third = nn.Linear(16, 1)

        def forward(self, batch: Tensor) -> Tensor:
            hidden, _ = self.first(batch)
            hidden, _ = self.second(torch.tanh(hidden))
            return self.third(torch.tanh(hidden))

    size = parallel_state.get_tensor_model_parallel_world_size()
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    found = Network(TransformerConfig(**sizes, tensor_model_parallel_size=size, use_cpu_initialization=True))
    with torch.no_grad():
        for weight, whole in zip(found.parameters(), network.parameters(), strict=True):
            weight.requires_grad_(whole.requires_grad)
            along = getattr(weight, "partition_dim", 0)
            is_cut = getattr(weight, "tensor_model_parallel", False)
            weight.copy_(whole.chunk(size, along)[parallel_state.get_tensor_model_parallel_rank()] if is_cut else whole)
    return found


def by_plugin(**settings: Any) -> dict[str, Any]:
    """The arguments of `Accelerator`."""
    return {"megatron_lm_plugin": MegatronLMPlugin(gradient_clipping=0.0, **settings)}


def case(name: str, *reductions: str, **settings: Any) -> StrategyCase:
    arguments = partial(by_plugin, **settings)
    return StrategyCase(name, 2, arguments, [Deletion(reduction, arguments) for reduction in reductions])


CASES = (
    case("copies", MEAN),
    case("copies with parts of the optimizer", MEAN, NORM, use_distributed_optimizer=True),
    case("widths", SUM, NORM, tp_degree=2),
)
# Megatron keeps parts of Adam's states alone.
WITH_ADAMW = {"copies with parts of the optimizer"}


def outcomes(folder: str) -> dict[tuple[str, str], Outcome]:
    """By case and the reduction that it lacks the end of the training on this rank."""
    found = {}
    for one in CASES:
        for reduction in ("", *(deletion.reduction for deletion in one.deletions)):
            place, adamw = f"{folder}/{one.name} {reduction}", one.name in WITH_ADAMW
            with without(reduction):
                end = trained(place, one.arguments, "no", adamw, SAVED_AFTER, in_megatrons_layers)
            found[one.name, reduction] = end
    return found


def without(reduction: str) -> AbstractContextManager[Any]:
    """While it lasts, each process does this reduction by itself."""
    if reduction == MEAN:
        group = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
        return mock.patch(f"{group}.start_grad_sync")
    if reduction == NORM:
        return mock.patch("accelerate_nb.runtime.strategies.megatron.model_parallel.get_grad_norm_fp32", _own_norm)
    if reduction == SUM:
        layers = "megatron.core.tensor_parallel.layers"
        return mock.patch(f"{layers}.reduce_from_tensor_model_parallel_region", lambda output, **_: output)
    return nullcontext()


def _own_norm(gradients: list[Tensor], norm_type: float, _group: Any) -> float:
    return torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]), norm_type).item()


Found = list[dict[tuple[str, str], Outcome]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return on_ranks(outcomes, 2, str(tmp_path_factory.mktemp("contract")))


def rounding(case: StrategyCase) -> float:
    return ADAMW_ROUNDING if case.name in WITH_ADAMW else ROUNDING["no"]


def difference_of(found: Found, case: StrategyCase, reduction: str = "") -> float:
    return difference([outcome[case.name, reduction] for outcome in found], adamw=case.name in WITH_ADAMW)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_training_ends_in_the_weights_of_one_process(case: StrategyCase, found: Found) -> None:
    assert difference_of(found, case) < rounding(case)


@pytest.mark.parametrize(
    ("case", "reduction"), [(case, deletion.reduction) for case in CASES for deletion in case.deletions]
)
def test_without_a_reduction_it_ends_in_other_weights(case: StrategyCase, reduction: str, found: Found) -> None:
    assert difference_of(found, case, reduction) > 10 * rounding(case)
