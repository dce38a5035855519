"""A launch through torch_xla: where its ranks are, and what they see."""

from __future__ import annotations

import os


def place():
    from accelerate_nb import Accelerator

    accelerator = Accelerator()
    return str(accelerator.device), accelerator.num_processes, os.environ["PJRT_DEVICE"]


def test_a_function_computes_on_an_xla_device(on_xla):
    assert on_xla(place) == [("xla:0", 1, "CPU")]
