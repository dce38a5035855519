"""Weights are kept small and computed with large."""

from __future__ import annotations

import accelerate.big_modeling as theirs
import pytest
import torch

import accelerate_nb.big_modeling as ours
from tests.big_models.models import Deep, Small, seeded


@pytest.mark.parametrize(
    "options", [{}, {"skip_modules_pattern": ("linear1",)}, {"skip_modules_classes": (torch.nn.Linear,)}]
)
def test_layers_compute_what_accelerates_compute(options):
    found = []
    for package in (theirs, ours):
        model = seeded(Small)
        package.attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, **options)
        found.append((model(torch.ones(2, 3)), {name: parameter.dtype for name, parameter in model.named_parameters()}))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert found[1][1]["batchnorm.weight"] == torch.float32


def test_a_pattern_may_be_one_text():
    model = seeded(Deep)
    ours.attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=r"body\.1|head")
    assert model.body[0][0].up.weight.dtype == torch.float8_e4m3fn
    assert model.body[1][0].up.weight.dtype == torch.float32  # Accelerate reads the text letter by letter
    assert model.body[0][0].scale.dtype == torch.float32
    assert model(torch.ones(1, 8)).dtype == torch.float32
    assert model.body[0][0].up.weight.dtype == torch.float8_e4m3fn
