"""Numbers that torch_xla's devices do not compute in; nothing of torch_xla is needed to refuse them."""

from __future__ import annotations

import pytest
import torch

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.precision.registry import PrecisionOptions
from accelerate_nb.runtime.strategies.xla_ddp import XlaDDP
from accelerate_nb.runtime.world.world import World


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_numbers_that_these_devices_do_not_compute_in_are_refused(name):
    with pytest.raises(ConfigurationError, match="Use mixed_precision='bf16'"):
        XlaDDP(World(0, 1, 0, 1, torch.device("xla:0"), None)).choose_precision(name, PrecisionOptions())
