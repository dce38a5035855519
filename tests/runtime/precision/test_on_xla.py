"""Numbers that torch_xla's devices do not compute in; nothing of torch_xla is needed to refuse them."""

from __future__ import annotations

import pytest
import torch

from accelerate_nb.errors import ConfigurationError
from accelerate_nb.runtime.precision.registry import choose_precision


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_numbers_that_these_devices_do_not_compute_in_are_refused(name):
    with pytest.raises(ConfigurationError, match="Use mixed_precision='bf16'"):
        choose_precision(name, torch.device("xla:0"))
