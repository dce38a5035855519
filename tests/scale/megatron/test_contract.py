"""Copies and widths by Megatron end a training in the weights of one process, with the very loop that other strategies run."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate_nb.utils import MegatronLMPlugin
from tests.ranks import run_on_ranks
from tests.runtime.strategies.contract import ACCUMULATION, ADAMW_ROUNDING, ROUNDING, Outcome, difference, trained
from tests.scale.megatron.cuda_on_cpu import pretend_cuda

# Between two steps: Megatron can't give back the gradients of a window.
SAVED_AFTER = 2 * ACCUMULATION
CASES: dict[str, dict[str, Any]] = {
    "copies": {},
    "copies with parts of the optimizer": {"use_distributed_optimizer": True},
    "widths": {"tp_degree": 2},
}
# Megatron keeps parts of Adam's states alone.
WITH_ADAMW = {"copies with parts of the optimizer"}


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
    found = Network(
        TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            tensor_model_parallel_size=size,
            use_cpu_initialization=True,
        )
    )
    with torch.no_grad():
        for weight, whole in zip(found.parameters(), network.parameters(), strict=True):
            weight.requires_grad_(whole.requires_grad)
            along = getattr(weight, "partition_dim", 0)
            is_cut = getattr(weight, "tensor_model_parallel", False)
            weight.copy_(whole.chunk(size, along)[parallel_state.get_tensor_model_parallel_rank()] if is_cut else whole)
    return found


def by_plugin(**settings: Any) -> dict[str, Any]:
    """The arguments of `Accelerator`."""
    pretend_cuda()
    return {"megatron_lm_plugin": MegatronLMPlugin(gradient_clipping=0.0, **settings)}


def outcomes(folder: str) -> dict[str, Outcome]:
    """The end of the training on this rank, by case."""
    return {
        name: trained(
            f"{folder}/{name}",
            partial(by_plugin, **CASES[name]),
            "no",
            name in WITH_ADAMW,
            SAVED_AFTER,
            in_megatrons_layers,
        )
        for name in CASES
    }


@pytest.mark.timeout(180)
def test_a_training_ends_in_the_weights_of_one_process(tmp_path: Any) -> None:
    found = run_on_ranks(outcomes, 2, str(tmp_path), limit=110.0)
    for name in CASES:
        with_adamw = name in WITH_ADAMW
        rounding = ADAMW_ROUNDING if with_adamw else ROUNDING["no"]
        assert difference([outcome[name] for outcome in found], adamw=with_adamw) < rounding, name
