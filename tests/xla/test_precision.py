"""The numbers that a step is computed in on an XLA device."""

from typing import Any

import torch


def types() -> dict[str, Any]:
    from accelerate_nb import Accelerator
    from accelerate_nb.utils import AutocastKwargs

    accelerator = Accelerator(mixed_precision="bf16")
    layer = accelerator.prepare_model(torch.nn.Linear(4, 4))
    inputs = torch.ones(2, 4, device=accelerator.device)
    with accelerator.autocast():
        inside = layer.weight @ inputs.T
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        off = layer.weight @ inputs.T
    return {"weight": layer.weight.dtype, "output": layer(inputs).dtype, "inside": inside.dtype, "off": off.dtype}


def test_bf16_computes_in_bfloat16_and_keeps_float32_weights(on_xla):
    found = on_xla(types)[0]
    assert found == {"weight": torch.float32, "output": torch.float32, "inside": torch.bfloat16, "off": torch.float32}
