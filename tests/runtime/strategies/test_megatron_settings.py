"""Settings of Megatron that nothing reads are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate_nb.errors import NotYetError
from accelerate_nb.runtime.strategies.megatron.unused_settings import refuse_unused
from accelerate_nb.utils import MegatronLMPlugin


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden_dropout": 0.1},
        {"recompute_activations": True},
        {"train_iters": 100},
        {"custom_loss_function": print},
        {"num_layers_per_virtual_pipeline_stage": 2},
        {"other_megatron_args": {"a": 1}},
    ],
)
def test_a_setting_that_nothing_reads_is_named(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(NotYetError, match=rf"MegatronLMPlugin\({name}=\.\.\.\) was requested"):
        refuse_unused(MegatronLMPlugin(**settings))


def test_those_that_a_step_reads_are_let_through() -> None:
    refuse_unused(MegatronLMPlugin())
    refuse_unused(
        MegatronLMPlugin(
            tp_degree=2, pp_degree=2, num_micro_batches=4, gradient_clipping=0.5, sequence_parallelism=True
        )
    )
    refuse_unused(MegatronLMPlugin(use_distributed_optimizer=True, hidden_dropout=0.0, recompute_granularity="full"))
