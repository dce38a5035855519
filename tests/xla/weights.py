"""Weights that do not depend on what other threads of the process draw from torch's generator, which they share."""

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def fixed(model: M) -> M:
    """The model with the same weights whoever makes it."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 2)
    return model
