"""A launch through torch_xla: where its ranks are, what they see, and in what numbers they compute."""

import os
from importlib import import_module
from typing import Any

import torch

from accelerate_nb import Accelerator
from accelerate_nb.utils import AutocastKwargs


def cpu_after_an_import():
    # as many a library does
    import_module("torch_xla")
    return str(Accelerator().device), os.environ.get("PJRT_DEVICE")


def variables():
    return os.getpid(), {name: os.environ.get(name) for name in ("RANK", "CPU_NUM_DEVICES", "TPU_PROCESS_ADDRESSES")}


def test_each_rank_is_a_process_with_one_device_of_the_cpu(on_xla, monkeypatch):
    # as on Kaggle
    monkeypatch.setenv("TPU_PROCESS_ADDRESSES", "local")
    found = on_xla(variables, num_processes=2)
    assert len({pid for pid, _ in found}) == 2
    expected = [{"RANK": rank, "CPU_NUM_DEVICES": "1", "TPU_PROCESS_ADDRESSES": None} for rank in ("0", "1")]
    assert [environment for _, environment in found] == expected


def test_the_cpu_that_was_requested_is_without_torch_xla_whatever_a_library_loads(on_xla):
    assert on_xla(cpu_after_an_import, cpu=True) == [("cpu", None)]


def types() -> dict[str, Any]:
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
